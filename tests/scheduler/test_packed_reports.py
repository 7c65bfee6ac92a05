"""A report of several rounds means to the core what a report for each of them would have meant."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import BadInput
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import worker_link_pb2 as pb
from protos.v1 import types_pb2
from scheduler_service import reports
from scheduler_service.core.core import Core
from scheduler_service.core.events import Round, StepDone, Submitted
from scheduler_service.core.types import Plan
from scheduler_service.leader import Leader
from scheduler_service.store import Store
from scheduler_service.store.rounds import decode
from tests.scheduler.builders import core, records, request, worker_up
from tests.scheduler.live import Live, ScriptedGateway, ScriptedWorker, Switch, scheduler
from tests.waiting import until

Each = tuple[int, int, int]  # new, drafted, accepted
ROUND = st.integers(0, 4).flatmap(lambda drafted: st.integers(0, drafted).map(lambda n: (n + 1, drafted, n)))


def begun(policy: str) -> tuple[Core, Plan]:
    """Two requests run, and a third one waits."""
    own = core(policy)
    own.observe(worker_up(slots=2), 0.0)
    for id in "abc":
        own.observe(Submitted(request(id, 0.0)), 0.0)
    plan = own.plan("w")
    rows = [Round(run.id, run.placement, 0, 1, 0, 0, 4, 0, 1) for run in plan.schedule[:2]]
    own.observe(StepDone("w", tuple(rows), 900, 1.0), 1.0)
    return own, plan


def row(plan: Plan, place: int, start: int, rounds: list[Each]) -> Round:
    new, drafted, accepted = (sum(numbers) for numbers in zip(*rounds, strict=True))
    run = plan.schedule[place]
    each = tuple(rounds) if len(rounds) > 1 else ()
    return Round(run.id, run.placement, start, new, drafted, accepted, 0, 0, 2, each=each)


@pytest.mark.parametrize("policy", ["laps-sd", "gittins", "las", "mlfq", "srpt-length"])
@given(first=st.lists(ROUND, min_size=1, max_size=12), second=ROUND)
def test_records_and_the_next_plan_are_the_same(policy: str, first: list[Each], second: Each) -> None:
    one_by_one, plan = begun(policy)
    starts = [1, 1]
    for number, each in enumerate(first):
        rows = [row(plan, place, starts[place], [own]) for place, own in enumerate((each, second))]
        one_by_one.observe(StepDone("w", tuple(rows), 900, 1.0), 2.0 + number)
        starts = [start + own.new for start, own in zip(starts, rows, strict=True)]
    packed, plan = begun(policy)
    rows = [row(plan, place, 1, rounds) for place, rounds in enumerate((first, [second] * len(first)))]
    packed.observe(StepDone("w", tuple(rows), 900, float(len(first))), 1.0 + len(first))
    assert records(packed) == records(one_by_one)
    assert packed.plan("w") == one_by_one.plan("w")


def report(**figures: object) -> pb.StepReport:
    fields = {"request_id": "a", "tokens": [1, 2, 3], "drafted": 4, "accepted": 1}
    by_round = {"tokens_per_round": [2, 1], "drafted_per_round": [2, 2], "accepted_per_round": [1, 0]}
    return pb.StepReport(rows=[pb.Row(**(fields | by_round | figures))])  # type: ignore[arg-type]


def test_a_row_of_several_rounds_reaches_the_core_with_each_of_them() -> None:
    step, outputs = reports.read("w", report())
    (own,) = step.rounds
    assert outputs["a"][1] == [1, 2, 3]
    assert (own.new, own.drafted, own.accepted, own.count) == (3, 4, 1, 2)
    assert own.each == ((2, 2, 1), (1, 2, 0))


def test_a_request_begins_with_its_first_round_however_many_the_report_sums_up() -> None:
    own = core()
    own.observe(worker_up(slots=1), 0.0)
    own.observe(Submitted(request("a", 0.0)), 0.0)
    placement = own.plan("w").schedule[0].placement
    rows = [pb.Row(request_id="a", placement=placement, tokens=[1])]
    step, _ = reports.read("w", pb.StepReport(rows=rows, draft_s=1.0, verify_s=3.0, other_s=1.0, last_round_s=2.0))
    own.observe(step, 9.0)
    assert own.fleet.entries["a"].started == 9.0 - 2.0


@pytest.mark.parametrize(
    "figures",
    [{"draft_s": nan}, {"last_round_s": inf}, {"last_round_s": 1e12}, {"last_round_s": -1.0}, {"verify_s": -1.0}]
    + [{"last_round_s": 1.0, name: nan} for name in ("draft_s", "verify_s", "other_s", "wait_s", "idle_s")]
    + [{"last_round_s": 1.0, name: -9e8} for name in ("draft_s", "verify_s", "other_s", "wait_s", "idle_s")],
    ids=str,
)
def test_a_round_takes_some_time(figures: dict[str, float]) -> None:
    with pytest.raises(BadInput, match="last_round_s"):
        reports.read("w", pb.StepReport(**figures))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "figures",
    [
        {"tokens_per_round": [2, 2]},
        {"drafted_per_round": [4]},
        {"accepted_per_round": [0, 0]},
        {"drafted_per_round": [0, 4]},
    ],
    ids=str,
)
def test_rounds_that_do_not_make_up_the_row_are_refused(figures: dict[str, list[int]]) -> None:
    with pytest.raises(BadInput, match="rows"):
        reports.read("w", report(**figures))


def test_a_request_without_a_row_goes_on_if_the_report_is_partial() -> None:
    own, plan = begun("fcfs")
    own.observe(StepDone("w", (row(plan, 0, 1, [(1, 0, 0)]),), 900, 1.0, partial=True), 2.0)
    assert states(own) == {"a": "running", "b": "running", "c": "waiting"}
    own.observe(StepDone("w", (row(plan, 0, 2, [(1, 0, 0)]),), 900, 1.0), 3.0)
    assert states(own) == {"a": "running", "b": "paused", "c": "waiting"}


def test_in_a_partial_report_a_preemption_is_said_with_the_rounds_before_it() -> None:
    own, plan = begun("fcfs")
    preempted = replace(row(plan, 1, 1, [(2, 2, 1), (1, 2, 0)]), skipped=True)
    own.observe(StepDone("w", (preempted,), 900, 1.0, partial=True), 3.0)
    assert states(own) == {"a": "running", "b": "paused", "c": "waiting"}
    record = own.fleet.entries["b"].record()
    assert (record.emitted, record.acceptance.rounds, record.preemptions) == (4, 2, 1)
    again = replace(row(plan, 1, 4, [(0, 0, 0)]), skipped=True)  # nothing of it had waited
    own.observe(StepDone("w", (again,), 900, 1.0, partial=True), 4.0)
    assert own.fleet.entries["b"].record() == record


def states(own: Core) -> dict[str, str]:
    return {id: entry.state.value for id, entry in own.fleet.entries.items()}


async def test_the_rounds_of_a_report_are_stored_and_relayed_one_by_one(live: Live) -> None:
    leader, worker, gateway = live
    await gateway.submit("a")
    await worker.until("a")
    tokens = common_pb.Logprobs(tokens=[types_pb2.Logprob(logprob=-number) for number in range(1, 6)])
    by_round = {"tokens_per_round": [2, 1, 2], "drafted_per_round": [2, 2, 0], "accepted_per_round": [1, 0, 0]}
    sums = {"drafted": 4, "accepted": 1, "finish": types_pb2.FINISH_REASON_STOP, "logprobs": tokens}
    await worker.report(worker.row("a", 0, 5, 6, 7, 8, 9, **by_round, **sums), step=3)
    deltas: list[Any] = []
    while not deltas or not deltas[-1].HasField("ending"):
        deltas += (await gateway.read()).deltas
    assert [(delta.start, *delta.tokens) for delta in deltas] == [(0, 5, 6), (2, 7), (3, 8, 9)]
    assert [(delta.drafted, delta.accepted) for delta in deltas] == [(2, 1), (2, 0), (0, 0)]
    assert [one.logprob for delta in deltas for one in delta.logprobs.tokens] == [-1, -2, -3, -4, -5]
    assert deltas[-1].ending.rounds == 3
    stored = await leader.ledger.stored("a")
    assert stored is not None
    assert [round.tokens for round in decode(stored.log)] == [(5, 6), (7,), (8, 9)]


async def test_what_the_first_round_tells_of_the_prompt_is_stored_and_relayed_with_it_once(live: Live) -> None:
    leader, worker, gateway = live
    await gateway.submit("a")
    await worker.until("a")
    told = common_pb.Logprobs(prompt=[types_pb2.Logprob(logprob=-1.0)], embedding=[0.6, 0.8])
    by_round = {"tokens_per_round": [0, 2, 1], "drafted_per_round": [0, 0, 0], "accepted_per_round": [0, 0, 0]}
    await worker.report(
        worker.row("a", 0, 5, 6, 7, logprobs=told, **by_round, finish=types_pb2.FINISH_REASON_STOP), step=3
    )
    deltas: list[Any] = []
    while not deltas or not deltas[-1].HasField("ending"):
        deltas += (await gateway.read()).deltas
    assert [(delta.start, len(delta.logprobs.prompt)) for delta in deltas] == [(0, 0), (0, 1), (2, 0)]
    assert deltas[1].logprobs.embedding == pytest.approx([0.6, 0.8])
    stored = await leader.ledger.stored("a")
    assert stored is not None
    assert [bool(round.logprobs) for round in decode(stored.log)] == [False, True, False]


def test_only_the_row_with_the_first_token_tells_of_the_prompt() -> None:
    told = common_pb.Logprobs(embedding=[1.0])
    reports.read("w", report(logprobs=told))
    nothing = {"tokens": [], "accepted": 0, "tokens_per_round": [0, 0], "accepted_per_round": [0, 0]}
    for figures in ({"start": 1}, nothing):
        with pytest.raises(BadInput, match="tells of the prompt"):
            reports.read("w", report(logprobs=told, **figures))


async def test_commands_carry_the_setting(store: Switch) -> None:
    async with scheduler(store, report_within_ms=50) as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a")
        assert (await worker.until("a")).report_within_s == 0.05
        await gateway.close()
        await worker.close()


@asynccontextmanager
async def patient(store: Store) -> AsyncIterator[Live]:
    """A worker with one slot runs "a", its spare is "b", "c" waits; a command that can wait waits for ever."""
    async with scheduler(store, policy="fcfs", report_within_ms=50, max_lag=8) as (leader, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        leader.sessions["w"].report_within_s = 1e6
        for number, id in enumerate("abc", 1):
            await gateway.submit(id)
            await worker.until(*"ab"[:number])
            await gateway.until(lambda: len(gateway.accepted) == number)  # noqa: B023
        yield leader, worker, gateway
        await gateway.close()
        await worker.close()


async def seen(leader: Leader, step: int) -> None:
    async def reported() -> bool:
        return leader.sessions["w"].seen_step == step

    await until(reported)


async def go_on(worker: ScriptedWorker, reports: int) -> None:
    for start in range(reports):
        await worker.report(worker.row("a", start, 7), step=start + 1)


async def test_reports_of_rounds_that_go_on_share_a_command(store: Switch) -> None:
    async with patient(store) as (leader, worker, _):
        await go_on(worker, 3)
        await seen(leader, 3)
        assert not leader.sessions["w"].wake.is_set()
        worker.command.Clear()
        leader.sessions["w"].wake.set()  # as the timer does
        assert (await worker.next_command()).seen_step == 3


async def test_a_command_that_can_wait_is_sent_in_time(store: Switch) -> None:
    async with patient(store) as (leader, worker, _):
        leader.sessions["w"].report_within_s = 0.001
        await go_on(worker, 1)
        assert (await worker.next_command()).seen_step == 1


async def test_a_worker_never_waits_for_a_command_that_can_wait(store: Switch) -> None:
    async with patient(store) as (_, worker, _):
        await go_on(worker, 4)
        assert (await worker.next_command()).seen_step == 4  # half of max_lag


@pytest.mark.parametrize(
    ("tokens", "figures"),
    [((7,), {"finish": types_pb2.FINISH_REASON_STOP}), ((), {"skipped": pb.SKIP_NO_BLOCKS})],
    ids=["no spare request is left", "it waits for memory"],
)
async def test_what_is_urgent_is_answered_at_once(
    store: Switch, tokens: tuple[int, ...], figures: dict[str, Any]
) -> None:
    async with patient(store) as (_, worker, _):
        await go_on(worker, 2)
        await worker.report(worker.row("a", 2, *tokens, **figures), step=3, partial=True)
        assert (await worker.next_command()).seen_step == 3


async def test_a_cancellation_is_said_at_once(store: Switch) -> None:
    async with patient(store) as (_, worker, gateway):
        await gateway.cancel("a")
        assert list((await worker.next_command()).forget) == ["a"]


async def test_a_plan_that_is_to_last_lists_more_requests() -> None:
    own = core("fcfs", few_plans=True)
    own.observe(worker_up(slots=256, blocks=10**6), 0.0)
    for number in range(600):
        own.observe(Submitted(request(str(number), 0.0)), 0.0)
    assert len(own.plan("w").schedule) == 256 + 64
