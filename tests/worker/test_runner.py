"""The model's thread alone: which command a round runs, and how it ends."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.worker.harness import Tiny
from tests.worker.scripted import DEADLINE_S, PROMPT, a_runner
from worker_service.engine.engine import Engine
from worker_service.engine.hooks import LogitsContext
from worker_service.engine.pass_costs import PassCosts
from worker_service.engine.types import Admission, CostProfile, Limits, Run, Sampling, Skip, StepResult
from worker_service.pace import Pace
from worker_service.reporting import Report
from worker_service.runner import Command


@dataclass
class Gate:
    """A logits hook at which the model waits: what comes meanwhile came during a round."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)
    armed: bool = False
    start: int = 0  # from this output token on

    def __call__(self, logits: Any, context: LogitsContext) -> Any:
        if self.armed and context.start >= self.start:
            self.reached.set()
            assert self.opened.wait(DEADLINE_S)
        return logits


def admission(name: str, max_tokens: int = 3) -> Admission:
    limits = Limits(max_tokens, ignore_eos=True)
    return Admission(name, 1, PROMPT, len(PROMPT), Sampling(), limits)


def reporter() -> tuple[Callable[[Report], None], Callable[[], Report]]:
    """Where a runner reports to, and where a test waits for it."""
    done: list[Report] = []
    news = threading.Condition()
    read = 0

    def report(result: Report) -> None:
        with news:
            done.append(result)
            news.notify()

    def following() -> Report:
        nonlocal read
        with news:
            assert news.wait_for(lambda: len(done) > read, DEADLINE_S)
        read += 1
        return done[read - 1]

    return report, following


class Watched(Pace):
    """Notes when each round began, and when it ended."""

    def __init__(self) -> None:
        super().__init__(CostProfile(0.0, 1e-3, 0.0, 0.0, 0.0))
        self.rounds: list[tuple[float, float]] = []

    def hold(self, begun: float, result: StepResult) -> tuple[StepResult, float]:
        held, ended = super().hold(begun, result)
        self.rounds.append((begun, ended))
        return held, ended


async def test_a_paced_round_begins_where_the_one_before_ended_unless_it_had_to_wait(tiny: Tiny) -> None:
    """By this a pace tells lateness, which is made up for, from idle time, which is not."""
    pace = Watched()
    async with a_runner(tiny, pace=pace) as runner:
        assert runner.cost.verify_s == 1e-3
        report, following = reporter()
        runner.attach(4, report)
        for command, name in enumerate("ab", 1):
            admit = [admission(name)]
            runner.post(Command(command, 3 * command, [Run(name, 0, 64)], admit=admit))
            rounds = [await asyncio.to_thread(following) for _ in range(3)]
            assert rounds[-1].rounds[0][0].finish is not None
            await asyncio.to_thread(wait_until, lambda: runner.task is None)
    (a1, a1_end), (a2, a2_end), (a3, a3_end), (b1, _), *_ = pace.rounds
    assert (a2, a3) == (a1_end, a2_end)
    assert a1 < a2 < a3 < a3_end < b1


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline


async def test_of_commands_that_came_during_a_round_the_newest_rank_runs_and_every_edit_counts(tiny: Tiny) -> None:
    gate = Gate()
    async with a_runner(tiny, hooks=(gate,)) as runner:
        gate.armed = True
        report, following = reporter()
        runner.attach(100, report)
        runner.post(Command(1, 0, [Run("a", 0, 64)], admit=[admission("a"), admission("gone")]))
        assert await asyncio.to_thread(gate.reached.wait, DEADLINE_S)
        runner.post(Command(2, 0, [Run("b", 0, 64)], admit=[admission("b")], forget=["gone"]))
        runner.post(Command(3, 0, [Run("c", 0, 64)], admit=[admission("c")]))
        gate.opened.set()
        ran = [await asyncio.to_thread(following) for _ in range(4)]
        held = await asyncio.wait_for(asyncio.wrap_future(runner.detach()), DEADLINE_S)
    assert [(done.command_seq, done.rounds[0][0].request_id) for done in ran] == [(1, "a"), *[(3, "c")] * 3]
    assert {h.request_id: h.output_tokens for h in held} == {"a": 1, "b": 0, "c": 3}


async def test_a_round_that_got_nowhere_is_not_repeated_before_another_command(tiny: Tiny) -> None:
    async with a_runner(tiny, blocks=40) as runner:
        report, following = reporter()
        runner.attach(100, report)
        big = Admission("big", 1, list(range(5, 325)), 320, Sampling(), Limits(99, ignore_eos=True))
        runner.post(Command(1, 0, [Run("big", 0, 400)], admit=[big]))
        assert (await asyncio.to_thread(following)).rounds[0][0].tokens  # all 40 blocks are full now
        assert (await asyncio.to_thread(following)).rounds[0][0].skipped
        runner.post(Command(2, 2, [Run("big", 0, 400)]))  # the same again
        await asyncio.to_thread(wait_until, lambda: not runner._pending)  # taken in before the next one comes
        runner.post(Command(3, 2, [Run("big", 0, 400), Run("a", 0, 64)], admit=[admission("a")], forget=["big"]))
        after = await asyncio.to_thread(following)
    assert (after.step, after.command_seq) == (3, 3)


async def test_blocks_given_back_after_the_last_step_are_told_as_free(tiny: Tiny) -> None:
    async with a_runner(tiny) as runner:
        report, following = reporter()
        runner.attach(1, report)
        runner.post(Command(1, 0, [Run("a", 0, 64)], admit=[admission("a")]))
        assert (await asyncio.to_thread(following)).rounds[0][0].finish is None
        runner.post(Command(2, 1, [], forget=["a"]))
        answered = await asyncio.to_thread(following)
        assert runner.tally.free_blocks == answered.free_blocks == runner._engine.blocks


async def test_the_engine_weighs_drafts_by_what_its_own_passes_teach(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighed: list[PassCosts | None] = []
    weigh = Engine.weigh_drafts

    def noted(engine: Engine, costs: PassCosts | None) -> None:
        weighed.append(costs)
        weigh(engine, costs)

    monkeypatch.setattr(Engine, "weigh_drafts", noted)
    async with a_runner(tiny) as runner:
        before = weighed[-1].seconds(3)
        report, following = reporter()
        runner.attach(100, report)
        runner.post(Command(1, 0, [Run("a", 2, 64)], admit=[admission("a", 9)]))
        while (await asyncio.to_thread(following)).rounds[0][0].finish is None:
            continue
        assert weighed == [None, runner._costs.passes]  # the warm-up verifies all
        assert weighed[-1].seconds(3) != before


async def test_no_round_begins_after_detach(tiny: Tiny) -> None:
    async with a_runner(tiny) as runner:
        report, following = reporter()
        runner.attach(10_000, report)
        runner.post(Command(1, 0, [Run("a", 0, 64)], admit=[admission("a", 900)]))
        await asyncio.to_thread(following)
        first = await asyncio.wait_for(asyncio.wrap_future(runner.detach()), DEADLINE_S)
        second = await asyncio.wait_for(asyncio.wrap_future(runner.detach()), DEADLINE_S)
    assert first == second


async def test_steps_that_wait_for_their_report_are_reported_before_the_worker_waits(tiny: Tiny) -> None:
    async with a_runner(tiny) as runner:
        report, following = reporter()
        runner.attach(8, report)  # two steps share a report; the last of eight waits for no other one
        runner.post(Command(1, 0, [Run("a", 0, 64)], admit=[admission("a", 900)], report_within_s=60.0))
        reports = [await asyncio.to_thread(following) for _ in range(5)]
    assert [(done.step, len(done.rounds[0])) for done in reports] == [(1, 1), (3, 2), (5, 2), (7, 2), (8, 1)]


async def test_a_preemption_is_reported_with_the_rounds_that_waited(tiny: Tiny) -> None:
    gate = Gate(start=3)
    async with a_runner(tiny, hooks=(gate,)) as runner:
        gate.armed = True
        report, following = reporter()
        runner.attach(16, report)
        runner.post(Command(1, 0, [Run("a", 0, 64)], admit=[admission("a", 900)], report_within_s=60.0))
        assert await asyncio.to_thread(gate.reached.wait, DEADLINE_S)
        runner.post(Command(2, 0, [Run("b", 0, 64)], admit=[admission("b")], report_within_s=60.0))
        gate.opened.set()
        started, preempted = [await asyncio.to_thread(following) for _ in range(2)]
    assert (started.step, started.partial) == (1, False)
    assert (preempted.step, preempted.command_seq, preempted.partial) == (5, 2, False)
    rounds = {rows[0].request_id: [row.skipped for row in rows] for rows in preempted.rounds}
    assert rounds == {"a": [None, None, None, Skip.PREEMPTED], "b": [None]}


async def test_an_exception_of_the_model_ends_the_runner_with_it(tiny: Tiny) -> None:
    def broken(logits: Any, context: LogitsContext) -> Any:
        if context.tokens[: len(PROMPT)] == PROMPT:  # the warm-up may pass
            raise RuntimeError("out of memory")
        return logits

    async with a_runner(tiny, hooks=(broken,)) as runner:
        runner.attach(9, lambda report: None)
        runner.post(Command(1, 0, [Run("a", 0, 64)], admit=[admission("a")]))
        with pytest.raises(RuntimeError, match="out of memory"):
            await asyncio.wait_for(asyncio.wrap_future(runner.ended), DEADLINE_S)
