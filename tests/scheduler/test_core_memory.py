"""The core where the memory for KV is short. Time is a number."""

from dataclasses import replace

import pytest

from scheduler_service.core.costs import CostProfile
from scheduler_service.core.entry import WORTH
from scheduler_service.core.events import Round, StepDone, Submitted
from scheduler_service.core.lifecycle import State
from scheduler_service.core.types import Plan, RequestClass
from tests.scheduler.builders import COST, FakeWorker, core, request, worker_up


def test_the_kv_of_the_lowest_claim_is_dropped_when_memory_runs_out() -> None:
    """Six blocks of 16 tokens; the long request holds four of them and so does the short one."""
    worker = FakeWorker(core(), {"long": 60, "short": 30}, blocks=6)
    worker.submit("long")
    worker.run(55)
    worker.submit("short", prompt=40)
    assert worker.core.plan("w").drop == ("long",)
    assert worker.core.fleet.entries["long"].state is State.WAITING


def test_who_waits_for_memory_lets_its_holder_run_until_the_prefill_has_paid() -> None:
    """A prompt of 40 tokens at a tenth of a second each; then rounds of a second."""
    worker = FakeWorker(core(), {"holder": 60, "better": 5}, blocks=6, cost=replace(COST, prefill_token_s=0.1))
    worker.submit("holder", prompt=40)
    worker.step()
    worker.submit("better", prompt=40, klass=RequestClass.INTERACTIVE)
    ran = worker.run(40)
    assert ran.index("better") >= WORTH * 40 * 0.1
    assert "" not in ran[: ran.index("better")]


def test_the_round_in_which_kv_is_computed_is_part_of_its_price() -> None:
    """Prefill costs nothing here. Yet that round made one token only, and would be lost again and again."""
    worker = FakeWorker(core(), {"holder": 60, "better": 5}, blocks=6)
    worker.submit("holder", prompt=40)
    worker.step()
    worker.submit("better", prompt=40, klass=RequestClass.INTERACTIVE)
    assert worker.run(40).index("better") >= WORTH


def test_a_round_in_hand_does_not_bring_back_memory_that_was_given_away() -> None:
    """The plan that drops it is made before its last round is reported."""
    worker = FakeWorker(core(), {"long": 60, "short": 30}, blocks=6)
    worker.submit("long")
    worker.run(55)
    placement = worker.core.fleet.entries["long"].placement
    worker.submit("short", prompt=40)
    assert worker.core.plan("w").drop == ("long",)
    late = Round("long", placement, worker.core.fleet.entries["long"].emitted, 1, 4, 0, 0, 0, 4)
    worker.core.observe(StepDone("w", (late,), 2, 1.0), worker.now)
    assert worker.core.fleet.entries["long"].blocks == 0
    assert worker.core.fleet.entries["long"].state is State.WAITING


def test_memory_is_never_taken_from_a_better_claim() -> None:
    """Six blocks: the first holds four of them, and the second would need three."""
    worker = FakeWorker(core("fcfs"), {"first": 60, "second": 30}, slots=2, blocks=6)
    worker.submit("first", prompt=40)
    worker.run(10)
    worker.submit("second", prompt=40)
    plan = worker.core.plan("w")
    assert plan.drop == ()
    assert [run.id for run in plan.schedule] == ["first"]


def test_of_two_that_fill_all_memory_the_lower_claim_gives_way() -> None:
    """Six blocks, three each, and both in the slots: neither could grow if neither gave way."""
    worker = FakeWorker(core("fcfs"), {"first": 60, "second": 60}, slots=2, blocks=6)
    worker.submit("first", "second")
    worker.run(40)
    assert list(worker.resident) == ["first"]
    assert worker.ran[-1] == ("first",)


def test_the_best_claim_gets_all_memory_when_its_reserve_would_not_fit() -> None:
    """Six blocks, all held by the first; the second needs as many, and would like a reserve beyond them."""
    worker = FakeWorker(core(), {"first": 92, "second": 2}, slots=2, blocks=6)
    worker.submit("first", prompt=4)
    worker.run(85)
    worker.submit("second", prompt=90, klass=RequestClass.INTERACTIVE)
    worker.step()
    assert worker.ran[-1] == ("second",)
    assert "first" not in worker.resident


DEAR, CHEAP = (replace(COST, prefill_token_s=seconds) for seconds in (0.1, 0.01))


@pytest.mark.parametrize(("foresight", "cost"), [(False, DEAR), (True, DEAR), (True, CHEAP)])
def test_with_foresight_nobody_begins_who_would_be_dropped_where_that_is_dear(
    foresight: bool, cost: CostProfile
) -> None:
    """Six blocks, of which each comes to need four."""
    lengths = {"first": 60, "second": 60}
    worker = FakeWorker(core("fcfs", foresight=foresight), lengths, slots=2, blocks=6, cost=cost)
    worker.submit("first", "second", predicted_tokens=60, max_tokens=60)
    worker.run(130)
    assert not worker.core.fleet.entries
    served = [number for number, ids in enumerate(worker.ran) if "second" in ids]
    at_a_stretch = served == list(range(served[0], served[0] + 60))
    assert at_a_stretch == (foresight and cost is DEAR)


def test_with_foresight_a_short_one_begins_where_a_long_one_must_wait() -> None:
    """It is over before the memory that the first will need is missing."""
    lengths = {"first": 60, "long": 60, "short": 5}
    worker = FakeWorker(core("gittins", foresight=True), lengths, slots=3, blocks=6, cost=DEAR)
    for id, tokens in worker.lengths.items():
        worker.submit(id, predicted_tokens=tokens, max_tokens=tokens)
    worker.step()
    assert set(worker.ran[-1]) == {"first", "short"}


def test_one_shortage_of_memory_is_paid_for_once() -> None:
    """What one plan drops is free for the next, which may be made before the worker's next report."""
    worker = FakeWorker(core("fcfs"), {"first": 90, "second": 60, "third": 60}, slots=3, blocks=6)
    worker.submit("first", "second", "third")
    worker.run(11)
    assert worker._free() == 3
    worker.core.fleet.workers["w"].free_blocks = 0
    drops = [worker.core.plan("w").drop for _ in range(3)]
    assert drops == [("third",), (), ()]


def test_a_request_that_lost_its_kv_finishes_all_the_same() -> None:
    worker = FakeWorker(core(), {"long": 60, "short": 30}, blocks=6)
    worker.submit("long")
    worker.run(55)
    worker.submit("short", prompt=40)
    worker.run(40)
    assert not worker.core.fleet.entries


class Sharing:
    """A worker whose requests have their first blocks in common. It reports for each those that are its own."""

    def __init__(self, shared: int, blocks: int, slots: int) -> None:
        self.core, self.shared, self.blocks, self.now = core(), shared, blocks, 0.0
        self.core.observe(worker_up(slots=slots, blocks=blocks), 0.0)

    def submit(self, *ids: str, **more: object) -> Plan:
        """Returns the plan that follows."""
        for id in ids:
            self.core.observe(Submitted(request(id, self.now, **more)), self.now)  # type: ignore[arg-type]
        return self.core.plan("w")

    def step(self, *ids: str, own: int) -> None:
        """A round in which these ran, each with so many blocks of its own."""
        entries = [self.core.fleet.entries[id] for id in ids]
        rows = [Round(one.request.id, one.placement, one.emitted, 1, 0, 0, one.prefill_owed, 0, own) for one in entries]
        self.now += 1
        free = self.blocks - self.shared - own * len(ids)
        self.core.observe(StepDone("w", tuple(rows), free, 1.0), self.now)


def test_blocks_that_requests_share_are_asked_for_once() -> None:
    """Each fills 25 blocks of 16 tokens, of which 24 are the same: 82 of 110 stay free."""
    worker = Sharing(shared=24, blocks=110, slots=4)
    worker.submit(*"abcd", prompt=384)
    worker.step(*"abcd", own=1)
    assert [run.id for run in worker.core.plan("w").schedule] == [*"abcd"]


def test_nobody_begins_in_the_block_that_another_is_about_to_need() -> None:
    """Of three blocks one has a slot's 16 tokens, and its next token begins a second one; a newcomer would take two."""
    worker = Sharing(shared=0, blocks=3, slots=2)
    worker.submit("a", prompt=16)
    worker.step("a", own=1)
    assert [run.id for run in worker.submit("b", prompt=16).schedule] == ["a"]


def test_all_give_up_their_kv_for_the_best_claim_where_they_share_most_of_it() -> None:
    """Two share 40 blocks and have 20 each of their own; 20 are free, and the best claim needs 70."""
    worker = Sharing(shared=40, blocks=100, slots=2)
    worker.submit(*"ab", prompt=950)
    for _ in range(5):
        worker.step(*"ab", own=20)
    plan = worker.submit("best", prompt=1100, klass=RequestClass.INTERACTIVE)
    assert sorted(plan.drop) == ["a", "b"]
    assert [run.id for run in plan.schedule] == ["best"]
