"""Requests that kill workers are found by exclusion, and nobody is ended for what a neighbour did."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.link.v1 import worker_link_pb2 as worker_pb
from protos.v1 import types_pb2
from scheduler_service.core.core import Core
from scheduler_service.core.costs import CostProfile
from scheduler_service.core.events import Held, Obeyed, StepDone, Submitted, WorkerDown
from scheduler_service.core.isolation import PROBATION_ROUNDS
from scheduler_service.core.lifecycle import State
from scheduler_service.core.placement import GROUPS, idle_beside_work
from scheduler_service.core.types import Changed, Effect, Ended, Plan
from scheduler_service.store import MemoryStore
from tests.scheduler.builders import FakeWorker, core, request, worker_up
from tests.scheduler.live import ScriptedGateway, ScriptedWorker, scheduler

MAX_DEATHS = 3
SLOW_PREFILL = CostProfile(draft_s=0.0, verify_s=1.0, verify_slope_s=0.0, prefill_token_s=100.0)  # KV is dear


class Mortal(FakeWorker):
    """Dies in a round that has a poisonous request at its fatal position; obeys plans when it likes, as a real one."""

    def __init__(self, fleet: "SimFleet", name: str, slots: int) -> None:
        super().__init__(fleet.core, fleet.lengths, name, slots)
        self.fleet, self.plan, self.number = fleet, Plan((), ()), 0

    def obey(self) -> None:
        self.plan = self.core.plan(self.name)
        self.number = self.core.fleet.workers[self.name].planned
        for id in (*self.plan.drop, *self.plan.offload):
            self.resident.pop(id, None)
        if not self.plan.schedule:
            self.core.observe(Obeyed(self.name, self.number), 0.0)

    def round(self) -> tuple[Effect, ...]:
        """Of the plan that stands, however old it is."""
        runs = [run for run in self.plan.schedule if run.id in self.core.fleet.entries][: self.slots]
        if any(self.core.fleet.entries[run.id].emitted >= self.fleet.fatal.get(run.id, math.inf) for run in runs):
            return self.fleet.bury(self)
        rows = tuple(self._row(run.id, run.placement, 1, 0) for run in runs)
        return self.core.observe(StepDone(self.name, rows, self.blocks, 1.0, self.number), 0.0) if rows else ()


class SimFleet:
    """`fatal`: output tokens at which a request kills its worker."""

    def __init__(self, workers: int, slots: int, lengths: dict[str, int], fatal: dict[str, int]) -> None:
        self.core: Core = core(max_deaths=MAX_DEATHS)
        self.lengths, self.fatal, self.slots = lengths, fatal, slots
        self.deaths = 0
        self.ended: dict[str, State] = {}
        self.workers = {name: Mortal(self, name, slots) for name in "uvw"[:workers]}
        for id in lengths:
            self.core.observe(Submitted(request(id)), 0.0)

    def bury(self, worker: Mortal) -> tuple[Effect, ...]:
        self.deaths += 1
        effects = self.core.observe(WorkerDown(worker.name, died=True), 0.0)
        self.workers[worker.name] = Mortal(self, worker.name, self.slots)
        return effects

    def do(self, name: str, verb: str) -> None:
        worker = self.workers[name]
        effects = worker.round() if verb == "round" else worker.obey()
        self.ended |= {e.record.request.id: e.record.state for e in effects or () if isinstance(e, Ended)}
        for id, suspect in self.core.fleet.isolation.suspects.items():
            home = suspect.home and self.core.fleet.workers[suspect.home]
            assert suspect.probation > 0
            assert not home or id in home.quarantined

    def run(self, rng: random.Random) -> None:
        """Until all have ended."""
        for _ in range(20_000):
            if not self.core.fleet.entries:
                return
            self.do(rng.choice(list(self.workers)), rng.choice(["obey", "round"]))
        raise AssertionError(f"never ended: {list(self.core.fleet.entries)}")


@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(1, 3),
    slots=st.integers(1, 4),
    innocents=st.integers(0, 9),
    fatal=st.lists(st.integers(0, 12), min_size=1, max_size=2),
    seed=st.integers(0, 1 << 16),
)
def test_an_innocent_is_never_ended_and_the_guilty_is_after_few_deaths(
    workers: int, slots: int, innocents: int, fatal: list[int], seed: int
) -> None:
    poison = {f"p{i}": position for i, position in enumerate(fatal)}
    fleet = SimFleet(workers, slots, {**{f"i{i}": 15 for i in range(innocents)}, **dict.fromkeys(poison, 40)}, poison)
    fleet.run(random.Random(seed))
    assert {id for id, state in fleet.ended.items() if state is State.FAILED} == set(poison)
    assert len(fleet.ended) == innocents + len(poison)
    assert fleet.deaths <= (MAX_DEATHS + 1) * len(poison)


def died(worker: FakeWorker) -> tuple[Effect, ...]:
    return worker.core.observe(WorkerDown(worker.name, died=True), worker.now)


def crashed(ids: str, slots: int = 4) -> FakeWorker:
    """A worker that has just come back after it died with these in their first round, of which nobody heard."""
    worker = FakeWorker(core("fcfs"), dict.fromkeys(ids, 99), slots=slots)
    worker.submit(*ids)
    worker.core.plan("w")
    died(worker)
    return FakeWorker(worker.core, worker.lengths, slots=slots)


def test_whoever_was_listed_is_suspected_and_that_is_written_down() -> None:
    worker = FakeWorker(core("fcfs"), {}, slots=2)
    worker.submit("a", "b")
    worker.core.plan("w")
    effects = died(worker)
    assert [(type(effect), effect.record.request.id) for effect in effects] == [(Changed, "a"), (Changed, "b")]
    assert all(effect.record.probation == PROBATION_ROUNDS for effect in effects)
    successor = core("fcfs")
    successor.restore(effect.record for effect in effects)
    assert list(successor.fleet.isolation.suspects) == ["a", "b"]


def test_who_has_gone_elsewhere_since_it_was_listed_is_no_suspect() -> None:
    queue = core("fcfs")
    worker = FakeWorker(queue, dict.fromkeys("ab", 99))
    worker.submit("a", "b")
    assert [run.id for run in queue.plan("w").schedule] == ["a", "b"]
    claims = FakeWorker(queue, worker.lengths, "claims")
    claims.step()
    assert claims.ran == [("b",)]
    died(worker)
    assert list(queue.fleet.isolation.suspects) == ["a"]


def test_suspects_clear_themselves_one_after_the_other_and_then_run_together() -> None:
    worker = crashed("abc")
    for _ in range(3 * PROBATION_ROUNDS):
        worker.step()
        if not worker.ran[-1]:  # what the plan before listed comes to its end
            worker.core.observe(Obeyed("w", worker.core.fleet.workers["w"].planned), worker.now)
    assert Counter(len(ids) for ids in worker.ran)[1] >= 2 * PROBATION_ROUNDS
    worker.run(PROBATION_ROUNDS)
    assert worker.ran[-1] == ("a", "b", "c")


def test_others_run_on_while_one_worker_is_set_apart() -> None:
    queue = core("fcfs")
    first, second = (FakeWorker(queue, dict.fromkeys("abcd", 99), name, slots=2) for name in ("first", "second"))
    for worker, ids in ((first, "ab"), (second, "cd")):
        worker.submit(*ids)
        worker.step()
    died(first)
    second.step()
    assert second.ran[-1] == ()  # it will be theirs: the first one is away
    back = FakeWorker(queue, first.lengths, "first", slots=2)
    back.step()
    assert back.ran[-1] == ("c", "d")


def test_no_suspect_begins_before_the_end_of_what_may_be_under_way() -> None:
    queue = core("fcfs")
    first, second = (FakeWorker(queue, dict.fromkeys("ab", 99), name) for name in ("first", "second"))
    for worker, id in ((first, "a"), (second, "b")):
        worker.submit(id)
        worker.step()
    running = queue.fleet.workers["second"].planned
    died(first)
    assert not queue.plan("second").schedule
    assert not queue.plan("second").schedule
    queue.observe(Obeyed("second", running), 0.0)  # a heartbeat that tells of the plan before
    assert not queue.plan("second").schedule
    queue.observe(Obeyed("second", running + 1), 0.0)
    assert [run.id for run in queue.plan("second").schedule] == ["a"]


def beside(old: FakeWorker, prompt: int, rounds: int) -> Core:
    """After `rounds` of "old" there a suspect comes, "late", and has the worker to itself."""
    served = old.core
    old.submit("old")
    old.run(rounds)
    old.submit("late", prompt=prompt)
    suspect = served.fleet.entries["late"]
    suspect.probation = 2 * PROBATION_ROUNDS
    suspect.crowd = 1
    served.fleet.isolation.join(suspect)
    assert served.plan("w").schedule == ()
    served.observe(Obeyed("w", served.fleet.workers["w"].planned), old.now)
    return served


def test_suspects_get_the_memory_that_better_claims_hold() -> None:
    """They waited for each other for ever. (Simulated faults, seed 8687.)"""
    served = beside(FakeWorker(core("fcfs"), {"old": 1000, "late": 5}, blocks=4), prompt=40, rounds=20)
    plan = served.plan("w")
    assert [run.id for run in plan.schedule] == ["late"]
    assert plan.drop == ("old",)


def test_a_suspect_that_has_begun_goes_on_in_memory_that_a_better_claim_holds() -> None:
    """Of what it has itself it gives nothing back, and nobody else was asked. (Simulated faults, seed 118432.)"""
    worker = FakeWorker(core("fcfs"), {"old": 1000, "late": 1000}, blocks=4, cost=SLOW_PREFILL)
    beside(worker, prompt=26, rounds=14)  # two blocks each at first, then a third
    worker.run(PROBATION_ROUNDS)
    assert worker.ran[-PROBATION_ROUNDS:] == [("late",)] * PROBATION_ROUNDS
    assert set(worker.resident) == {"late"}


def test_nobody_runs_beside_a_suspect_that_waits_for_memory() -> None:
    worker = FakeWorker(core("fcfs"), {"old": 1000, "late": 5}, slots=2, blocks=4, cost=SLOW_PREFILL)
    served = beside(worker, prompt=40, rounds=2)  # too few for what the KV of "old" has cost
    assert [run.id for run in served.plan("w").schedule] == ["late"]


def test_a_suspect_waits_for_no_worker_that_is_too_small_for_it() -> None:
    """The small one has as many vacant slots, and came first."""
    queue, lengths = core("fcfs"), {"large": 99}
    small = FakeWorker(queue, lengths, "small", slots=4, blocks=100)
    dies = FakeWorker(queue, lengths, "holds", slots=4, blocks=2000)
    dies.submit("large", prompt=5000, max_tokens=100)
    dies.step()
    died(dies)
    back = FakeWorker(queue, lengths, "holds", slots=4, blocks=2000)
    assert idle_beside_work(queue.fleet) == "holds"
    small.step()
    back.run(PROBATION_ROUNDS)
    assert (small.ran, back.ran) == ([()], [("large",)] * PROBATION_ROUNDS)
    assert not queue.fleet.isolation.suspects


def test_many_suspects_go_in_groups_which_a_death_divides() -> None:
    ids = [f"r{i:02}" for i in range(40)]
    worker = FakeWorker(core("fcfs"), dict.fromkeys(ids, 99), slots=40)
    worker.submit(*ids)
    sizes = []
    for _ in range(3):
        sizes.append(len(worker.core.plan("w").schedule))
        died(worker)
        worker.core.observe(worker_up(slots=40), 0.0)
    assert sizes == [40, -(-40 // GROUPS), 1]


def test_a_worker_that_still_holds_what_it_had_did_not_die() -> None:
    worker = FakeWorker(core("fcfs"), dict.fromkeys("ab", 99), slots=2)
    worker.submit("a", "b")
    worker.step()
    died(worker)
    assert set(worker.core.fleet.isolation.suspects) == {"a", "b"}
    worker.core.observe(worker_up(slots=2, held=(Held("a", 1, 1), Held("b", 1, 1))), worker.now)
    assert not worker.core.fleet.isolation.suspects
    assert [run.placement for run in worker.core.plan("w").schedule] == [1, 1]


def test_what_was_on_its_way_to_a_worker_that_did_not_die_is_no_suspect() -> None:
    worker = FakeWorker(core("fcfs", max_deaths=2), dict.fromkeys("abc", 99), slots=3)
    worker.submit("a", "b")
    worker.step()
    for _ in range(3):  # the command that admits it gets lost with the link
        if "c" not in worker.core.fleet.entries:
            worker.submit("c")
        worker.core.plan("w")
        died(worker)
        assert "c" in worker.core.fleet.isolation.suspects
        worker.core.observe(worker_up(slots=3, held=(Held("a", 1, 1), Held("b", 1, 1))), worker.now)
        assert not worker.core.fleet.isolation.suspects


def test_what_a_worker_died_of_stays_a_suspect_when_the_link_of_the_new_one_is_cut() -> None:
    worker = FakeWorker(core("fcfs"), dict.fromkeys("ab", 99), slots=2)
    worker.submit("a")
    worker.step()
    died(worker)
    worker.core.observe(worker_up(slots=2), worker.now)
    died(worker)
    worker.core.observe(worker_up(slots=2, held=(Held("b", 1, 1),)), worker.now)
    assert set(worker.core.fleet.isolation.suspects) == {"a"}


def test_cut_links_never_add_up_to_a_guilt() -> None:
    worker = FakeWorker(core("fcfs", max_deaths=2), {"a": 99})
    worker.submit("a")
    for _ in range(9):
        worker.core.plan("w")
        died(worker)
        worker.core.observe(worker_up(held=(Held("a", worker.core.fleet.entries["a"].placement, 1),)), 0.0)
    assert worker.core.fleet.entries["a"].deaths == 0


async def test_a_request_that_kills_each_worker_ends_with_a_sentence_and_its_neighbour_goes_on() -> None:
    async with scheduler(MemoryStore(), policy="fcfs", max_deaths=2) as (_, target):
        gateway, first = ScriptedGateway(target), await ScriptedWorker(target, slots=2).attach()
        await gateway.until(lambda: gateway.serving.ready)
        for id in ("poison", "innocent"):
            await gateway.submit(id)
        await first.until("poison", "innocent")
        await first.close()
        for _ in range(2):
            dies = await ScriptedWorker(target, slots=2).attach()
            await dies.until("poison")
            await dies.close()
        last = await ScriptedWorker(target, slots=2).attach()
        await last.until("innocent")
        await gateway.until(lambda: "poison" in gateway.endings)
        ending = gateway.endings["poison"]
        assert ending.finish_reason == types_pb2.FINISH_REASON_ERROR
        assert ending.message == "2 workers died while they ran this request alone: do not send it again"
        await last.report(last.row("innocent", 0, 7, finish=types_pb2.FINISH_REASON_STOP))
        await gateway.until(lambda: "innocent" in gateway.endings)
        await last.close()
        await gateway.close()


async def test_a_live_worker_is_set_apart_once_it_has_said_that_nothing_is_under_way() -> None:
    async with scheduler(MemoryStore(), policy="fcfs") as (_, target):
        gateway, dies = ScriptedGateway(target), await ScriptedWorker(target, "dies").attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a")
        await dies.until("a")
        lives = await ScriptedWorker(target, "lives").attach()
        await gateway.submit("b")
        await lives.until("b")
        await lives.report(lives.row("b", 0, 7), command_seq=lives.command.seq)
        await dies.close()
        await lives.until()
        await lives.report(lives.row("b", 1, 7), command_seq=lives.command.seq - 1)  # it was under way
        idle = worker_pb.StepReport(command_seq=lives.command.seq)
        await lives.report(command_seq=idle.command_seq)
        await lives.until("a")
        await lives.close()
        await gateway.close()


@pytest.mark.parametrize("leaves", [True, False])
async def test_only_who_does_not_take_its_leave_makes_suspects(leaves: bool) -> None:
    async with scheduler(MemoryStore()) as (leader, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a")
        await worker.until("a")
        if leaves:
            await worker.report(leaving=True)
        else:
            await worker.close()
        await gateway.until(lambda: not gateway.serving.ready)
        assert bool(leader.core.fleet.isolation.suspects) is not leaves
        await worker.close()
        await gateway.close()
