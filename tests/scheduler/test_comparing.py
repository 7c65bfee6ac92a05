"""Which policy would have served the last minutes' requests how well: kept, tried, answered."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from protos.times import seconds
from protos.v1 import types_pb2
from scheduler_service import comparing
from scheduler_service.comparing import LEAST, Comparing
from scheduler_service.config import Settings
from scheduler_service.core.costs import CostProfile
from scheduler_service.core.lifecycle import State
from scheduler_service.history import KEPT_S, MOST_REQUESTS, MOST_TOKENS, History
from scheduler_service.insight import compare_policies
from scheduler_service.leader import Leader
from scheduler_service.round_log import RoundLog
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.side_by_side import QUESTION, Question, side_by_side
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job
from scheduler_service.store import MemoryStore
from scheduler_service.store.rounds import encode
from tests.scheduler.builders import FakeWorker, core, request
from tests.scheduler.live import ScriptedGateway, ScriptedWorker, scheduler
from tests.waiting import until


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def fill(history: History, count: int, *, tokens: int = 6, at: float = 1000.0, scores: int = 0) -> None:
    """So many requests ended one after the other; each drafted 4 tokens a round, and 2 of them were accepted."""
    log = RoundLog(b"".join(encode([1, 2, 3], 4, 2) for _ in range(tokens // 3)))
    entry = core("fcfs")
    worker = FakeWorker(entry, {"a": 1})
    worker.submit("a")
    record = entry.fleet.entries["a"].record()
    for number in range(count):
        one = replace(record, request=request(f"r{number}", at - 5 + number / 100), emitted=tokens)
        history.add(replace(one, state=State.FINISHED), at + number / 100, log, logprobs=False, scores=scores)


def comparison(clock: Clock, command: Sequence[str] = comparing.COMMAND) -> tuple[Comparing, History, FakeWorker]:
    history, settings = History(), Settings(_cli_parse_args=False, policy="srpt-length")  # type: ignore[call-arg]
    live = core("srpt-length")
    worker = FakeWorker(live, {})
    return Comparing(settings, live.fleet, history, clock, command), history, worker


async def made(compared: Comparing) -> None:
    """The comparison that is being made is there, or has failed."""

    async def idle() -> bool:
        return not compared.computing

    await until(idle)


@asynccontextmanager
async def running(compared: Comparing) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(compared.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_what_ended_long_ago_is_forgotten() -> None:
    history = History()
    fill(history, 3)
    assert len(history.since(1000.0)) == 3
    assert history.since(1001.0 + KEPT_S) == []


def test_the_history_is_bounded_in_requests_and_in_tokens() -> None:
    history = History()
    fill(history, MOST_REQUESTS + 5)
    assert len(history.since(1000.0)) == MOST_REQUESTS
    fill(history, 3, tokens=MOST_TOKENS // 3)
    assert len(history.since(1000.0)) <= 3
    fill(history, 3, scores=MOST_TOKENS // 2)
    assert len(history.since(1000.0)) <= 2


def test_an_ended_request_is_a_job_with_its_own_rounds() -> None:
    history = History()
    fill(history, 1, tokens=6)
    (ended,) = history.since(1000.0)
    job = ended.job(draft_len=4)
    assert (job.output_tokens, job.drafted, job.accepted) == (6, (4, 4), (2, 2))
    assert ended.latency_s == 5.0


def test_the_costs_that_a_worker_measures_are_the_costs_of_the_simulation() -> None:
    profile = CostProfile(0.002, 0.04, 0.01, 0.0005, 0.001, 0.003, 0.0001)
    again = StepCosts.of(profile).profile()
    for name in profile.__slots__:
        assert getattr(again, name) == pytest.approx(getattr(profile, name)), name


def test_the_same_jobs_under_several_policies() -> None:
    """Two long requests before a short one, on one slot: the shortest first has the lower mean."""
    jobs = [
        Job(f"{number}", number / 1000, 4, length, (2,), drafted=(4,), predicted_output_tokens=length)
        for number, length in enumerate((60, 60, 6))
    ]
    question = Question(jobs, SimFleet(), ["fcfs", "srpt-length:length_margin=0.2"])
    answer = side_by_side(QUESTION.validate_json(QUESTION.dump_json(question)))
    assert answer["srpt-length:length_margin=0.2"]["mean_e2el_ms"] < answer["fcfs"]["mean_e2el_ms"]


async def test_a_comparison_is_made_once_and_kept_for_a_while() -> None:
    clock = Clock()
    compared, history, _ = comparison(clock)
    fill(history, LEAST)
    async with running(compared):
        compared.ask()
        assert compared.computing
        await made(compared)
        first = compared.newest
        assert first is not None, compared.problem
        assert {"fcfs", "gittins", "oracle", "srpt-length"} <= first.policies.keys()
        assert (first.requests, first.running) == (LEAST, "srpt-length")
        assert first.measured_s == pytest.approx(5.0)
        compared.ask()
        assert not compared.computing
        clock.now += comparing.KEPT_S
        compared.ask()
        assert compared.computing


async def test_with_another_model_neither_a_comparison_is_left_nor_what_it_was_about() -> None:
    compared, history, _ = comparison(Clock())
    fill(history, LEAST)
    async with running(compared):
        compared.ask()
        await made(compared)
        assert compared.newest is not None, compared.problem
        compared.forget()
        assert (compared.newest, compared.ended) == (None, 0)
        fill(history, LEAST)
        compared.ask()
        assert compared.computing


async def test_a_comparison_under_way_when_the_model_changes_is_of_no_use() -> None:
    compared, history, _ = comparison(Clock())
    fill(history, LEAST)
    async with running(compared):
        compared.ask()
        await asyncio.sleep(0)  # it has read the history
        compared.forget()
        await made(compared)
        assert (compared.newest, compared.problem) == (None, "")


async def test_a_worker_of_another_model_has_the_requests_of_the_last_one_forgotten() -> None:
    async with scheduler(MemoryStore()) as (leader, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a")
        await worker.until("a")
        await worker.report(worker.row("a", 0, 7, finish=types_pb2.FINISH_REASON_STOP))
        await gateway.until(lambda: "a" in gateway.endings)
        assert leader.comparing.ended == 1
        await worker.close()
        await gateway.until(lambda: not gateway.serving.ready)
        other = await ScriptedWorker(target).attach(model={"fingerprint": "other"})
        assert leader.comparing.ended == 0
        await other.close()
        await gateway.close()


async def test_too_few_requests_are_not_compared() -> None:
    compared, history, _ = comparison(Clock())
    fill(history, LEAST - 1)
    compared.ask()
    assert not compared.computing


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ([sys.executable, "-c", "raise SystemExit(3)"], "status 3"),
        ([sys.executable, "-c", "print('nonsense')"], "Invalid JSON"),
        (["/nonexistent"], "No such file"),
    ],
)
async def test_a_simulation_that_fails_is_told_and_tried_again_later(command: list[str], problem: str) -> None:
    clock = Clock()
    compared, history, _ = comparison(clock, command)
    fill(history, LEAST)
    async with running(compared):
        compared.ask()
        await made(compared)
        assert problem in compared.problem
        assert compared.newest is None
        clock.now += comparing.KEPT_S
        compared.ask()
        assert compared.computing


async def test_a_mistake_in_a_comparison_is_told_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, history, _ = comparison(Clock())
    fill(history, LEAST)

    def mistaken(*_: object) -> bytes:
        raise IndexError("a mistake")

    monkeypatch.setattr(comparing, "_question", mistaken)
    async with running(compared) as task:
        compared.ask()
        await made(compared)
        assert (compared.problem, compared.newest, task.done()) == ("internal error", None, False)


async def test_a_simulation_that_hangs_is_ended() -> None:
    history, settings = History(), Settings(_cli_parse_args=False)  # type: ignore[call-arg]
    live = core("fcfs")
    FakeWorker(live, {})
    hanging = [sys.executable, "-c", "import time; time.sleep(600)"]
    compared = Comparing(settings, live.fleet, history, Clock(), hanging, deadline_s=0.01)
    fill(history, LEAST)
    async with running(compared):
        compared.ask()
        await made(compared)
        assert compared.problem == "the simulation took too long"


async def test_the_answer_says_what_is_missing() -> None:
    leader = Leader(Settings(_cli_parse_args=False), MemoryStore())  # type: ignore[call-arg]
    answer = compare_policies(leader)
    assert (answer.running_policy, answer.ended_requests, answer.least_requests) == ("gittins", 0, LEAST)
    assert not answer.policies
    assert not answer.HasField("compare_time")
    assert seconds(answer.window) == 0
