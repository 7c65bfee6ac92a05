"""The worker's side of the step protocol, against a scripted scheduler on a real gRPC stream."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from protos.serving import LINK_MESSAGE_BYTES, Server
from protos.tls import Tls
from protos.v1 import gateway_link_pb2, types_pb2
from protos.v1 import worker_link_pb2 as pb
from protos.v1.worker_link_pb2_grpc import WorkerLinkServicer, add_WorkerLinkServicer_to_server
from tests.worker.harness import Tiny
from worker_service import link as link_module
from worker_service.engine.hooks import LogitsContext
from worker_service.engine.refine import RefinedProfile
from worker_service.engine.types import CostProfile, Limits, Run, Sampling, StepResult
from worker_service.link import Link
from worker_service.runner import Admission, Command, Report, Runner
from worker_service.wire import of_cost

DEADLINE_S = 20.0
HOST_BLOCKS = 4
PROMPT = [10, 11, 12, 13, 14, 15, 16, 17]


@dataclass
class Attachment:
    """One stream, as the scheduler sees it."""

    hello: pb.Hello
    context: Any
    reports: asyncio.Queue[pb.StepReport] = field(default_factory=asyncio.Queue)
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # by the worker
    hang_up: asyncio.Event = field(default_factory=asyncio.Event)
    seq: int = 0

    async def welcome(self, epoch: int = 7, max_lag: int = 100) -> None:
        await self.context.write(pb.ToWorker(welcome=pb.Welcome(epoch=epoch, max_lag=max_lag)))

    async def command(
        self,
        rank: Sequence[str],
        admit: Sequence[pb.Admit] = (),
        *,
        epoch: int = 7,
        session: str | None = None,
        seen_step: int = 0,
        draft_len: int = 2,
        **edits: Sequence[str],
    ) -> None:
        self.seq += 1
        runs = [pb.Run(request_id=name, draft_len=draft_len, prefill_tokens=64) for name in rank]
        command = pb.StepCommand(
            epoch=epoch,
            session=session or self.hello.session,
            seq=self.seq,
            seen_step=seen_step,
            admit=admit,
            rank=runs,
            **edits,
        )
        await self.context.write(pb.ToWorker(command=command))

    async def report(self) -> pb.StepReport:
        """The next one with rows."""
        while not (report := await self.reports.get()).rows:
            pass
        return report

    async def heartbeat(self) -> pb.StepReport:
        """The next report, which must be one without rows."""
        report = await self.reports.get()
        assert not report.rows
        return report


class ScriptedScheduler(WorkerLinkServicer):
    def __init__(self) -> None:
        self._attached: asyncio.Queue[Attachment] = asyncio.Queue()

    async def Attach(self, requests: Any, context: Any) -> None:  # noqa: N802
        attachment = Attachment((await context.read()).hello, context)
        await self._attached.put(attachment)
        reading = asyncio.create_task(self._read(attachment))
        await attachment.hang_up.wait()
        reading.cancel()

    async def _read(self, attachment: Attachment) -> None:
        try:
            while isinstance(message := await attachment.context.read(), pb.FromWorker):
                await attachment.reports.put(message.report)
        finally:
            attachment.ended.set()
            attachment.hang_up.set()

    async def attached(self) -> Attachment:
        return await self._attached.get()


def admit(name: str, output: Sequence[int] = (), *, placement: int = 1, max_tokens: int = 30) -> pb.Admit:
    return pb.Admit(
        request_id=name,
        placement=placement,
        tokens=[*PROMPT, *output],
        prompt_len=len(PROMPT),
        sampling=types_pb2.Sampling(temperature=1, top_p=1, seed=5),
        limits=types_pb2.Limits(max_tokens=max_tokens, ignore_eos=True),
    )


@asynccontextmanager
async def a_runner(tiny: Tiny, **options: Any) -> AsyncIterator[Runner]:
    runner = Runner(tiny.engine(host_blocks=HOST_BLOCKS, **options), slots=2, threads=1)
    runner.start()
    try:
        await asyncio.wrap_future(runner.warmed)
        yield runner
    finally:
        runner.stop()
        await asyncio.wait([asyncio.wrap_future(runner.ended)], timeout=DEADLINE_S)


@pytest.fixture
async def scheduler(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedScheduler]:
    """A scheduler, and a worker that dials it."""
    monkeypatch.setattr(link_module, "HEARTBEAT_S", 0.1)
    scheduler = ScriptedScheduler()
    server = Server([], LINK_MESSAGE_BYTES)
    add_WorkerLinkServicer_to_server(scheduler, server.grpc)
    port = await server.start("127.0.0.1", 0)

    async def on_attached(attached: bool) -> None:
        pass

    async with asyncio.timeout(DEADLINE_S), a_runner(tiny) as runner:
        link = Link(
            ["127.0.0.1:1", f"127.0.0.1:{port}"],  # nobody is at the first
            tls=Tls(),
            worker_id="w0",
            runner=runner,
            model=gateway_link_pb2.ModelInfo(name="tiny"),
            slots=2,
            blocks=256,
            block_tokens=8,
            host_blocks=HOST_BLOCKS,
            max_draft=8,
            on_attached=on_attached,
        )
        running = asyncio.create_task(link.run())
        try:
            yield scheduler
        finally:
            running.cancel()
            await asyncio.wait([running])
            await server.stop(0)


async def run_to_end(attachment: Attachment, name: str) -> list[int]:
    tokens: list[int] = []
    while True:
        row = (await attachment.report()).rows[0]
        assert row.request_id == name
        tokens.extend(row.tokens)
        if row.finish:
            return tokens


async def test_hello_says_what_the_worker_is(scheduler: ScriptedScheduler) -> None:
    hello = (await scheduler.attached()).hello
    assert (hello.protocol, hello.worker_id, hello.slots, hello.blocks, hello.block_tokens) == (1, "w0", 2, 256, 8)
    assert (hello.host_blocks, hello.cost.offload_block_s > 0) == (HOST_BLOCKS, True)
    assert hello.session
    assert hello.cost.verify_s > 0
    assert hello.model.name == "tiny"


async def test_a_standing_command_runs_until_its_requests_end(scheduler: ScriptedScheduler) -> None:
    attachment = await scheduler.attached()
    await attachment.welcome()
    await attachment.command(["a"], [admit("a", max_tokens=6)], draft_len=0)
    reports = [await attachment.report() for _ in range(6)]
    assert [report.step for report in reports] == [1, 2, 3, 4, 5, 6]
    assert {report.command_seq for report in reports} == {1}
    assert [report.rows[0].start for report in reports] == [0, 1, 2, 3, 4, 5]
    assert reports[-1].rows[0].finish == types_pb2.FINISH_REASON_LENGTH
    beat = await attachment.heartbeat()  # the finished one is listed still, and does not run
    assert (beat.step, beat.command_seq) == (6, 1)
    assert reports[-1].free_blocks == 256


async def test_the_worker_runs_at_most_max_lag_rounds_ahead(scheduler: ScriptedScheduler) -> None:
    attachment = await scheduler.attached()
    await attachment.welcome(max_lag=3)
    await attachment.command(["a"], [admit("a")], draft_len=0)
    assert [(await attachment.report()).step for _ in range(3)] == [1, 2, 3]
    assert (await attachment.heartbeat()).step == 3
    await attachment.command(["a"], seen_step=2, draft_len=0)
    resumed = [await attachment.report() for _ in range(2)]
    assert [report.step for report in resumed] == [4, 5]
    assert resumed[0].idle_us > 10_000  # it waited for more than a heartbeat, with work at hand
    assert (await attachment.heartbeat()).step == 5


async def test_idle_workers_send_heartbeats(scheduler: ScriptedScheduler) -> None:
    attachment = await scheduler.attached()
    await attachment.welcome()
    for _ in range(2):
        beat = await attachment.heartbeat()
        assert (beat.step, beat.epoch, beat.session) == (0, 7, attachment.hello.session)


async def test_after_a_broken_stream_kv_is_kept_and_cut_to_the_durable_tokens(scheduler: ScriptedScheduler) -> None:
    first = await scheduler.attached()
    await first.welcome()
    await first.command(["whole"], [admit("whole")])
    whole = await run_to_end(first, "whole")

    await first.command(["a"], [admit("a", max_tokens=200)])
    while (row := (await first.report()).rows[0]).start < 10:
        pass
    first.hang_up.set()

    second = await scheduler.attached()
    assert second.hello.session != first.hello.session
    held = {h.request_id: h for h in second.hello.held}
    assert held["a"].output_tokens >= row.start + len(row.tokens)
    assert held["a"].placement == 1

    await second.welcome(epoch=8)
    await second.command(["a"], [admit("a", whole[:9], placement=2)], epoch=8)
    report = await second.report()
    row = report.rows[0]
    assert (report.step, report.epoch) == (1, 8)
    assert (row.start, row.placement, row.prefilled) == (9, 2, 0)  # its KV was there
    assert whole[9:] == [*row.tokens, *await run_to_end(second, "a")]


@pytest.mark.parametrize(("edit", "lost"), [("offload", 0), ("drop", 3)])
async def test_offloaded_kv_comes_back_under_the_next_placement(
    scheduler: ScriptedScheduler, edit: str, lost: int
) -> None:
    attachment = await scheduler.attached()
    await attachment.welcome(max_lag=4)
    await attachment.command(["a"], [admit("a")], draft_len=0)
    output = [token for _ in range(4) for token in (await attachment.report()).rows[0].tokens]
    await attachment.command([], seen_step=4, **{edit: ["a"]})
    await attachment.command(["a"], [admit("a", output, placement=2)], seen_step=4, draft_len=0)
    row = (await attachment.report()).rows[0]
    assert (row.placement, row.start, row.prefilled) == (2, 4, lost)  # a full block of eight could be shared again


async def test_costs_that_have_changed_are_said_once_and_again_after_a_reconnect(
    scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    slower = CostProfile(0.5, 1.0, 0.25, 0.125, 0.0)

    def observe(profile: RefinedProfile, result: StepResult) -> CostProfile | None:
        first = profile.cost != slower
        profile.cost = slower
        return slower if first else None

    monkeypatch.setattr(RefinedProfile, "observe", observe)
    attachment = await scheduler.attached()
    assert attachment.hello.cost.verify_s < 1.0
    await attachment.welcome()
    await attachment.command(["a"], [admit("a", max_tokens=3)], draft_len=0)
    reports = [await attachment.report() for _ in range(3)]
    assert [report.HasField("cost") for report in reports] == [True, False, False]
    attachment.hang_up.set()
    assert (await scheduler.attached()).hello.cost == reports[0].cost == of_cost(slower)


async def test_a_scheduler_that_falls_silent_is_left(
    scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "SILENT_S", 0.1)
    first = await scheduler.attached()
    await first.welcome()
    second = await scheduler.attached()
    assert second.hello.session != first.hello.session


async def test_a_leader_of_a_lower_epoch_is_refused(scheduler: ScriptedScheduler) -> None:
    first = await scheduler.attached()
    await first.welcome(epoch=7)
    await first.heartbeat()
    first.hang_up.set()

    stale = await scheduler.attached()
    assert stale.hello.max_epoch == 7
    await stale.welcome(epoch=6)
    await stale.ended.wait()

    third = await scheduler.attached()
    await third.welcome(epoch=7)
    await third.heartbeat()


async def test_commands_of_another_session_or_a_lower_epoch_are_dropped(scheduler: ScriptedScheduler) -> None:
    attachment = await scheduler.attached()
    await attachment.welcome()
    await attachment.command(["a"], [admit("a")], session="somebody else's")
    await attachment.command(["a"], [admit("a")], epoch=6)
    await attachment.command(["b"], [admit("b", max_tokens=1)])
    report = await attachment.report()
    assert [row.request_id for row in report.rows] == ["b"]
    assert report.command_seq == 3


# ---- the model's thread alone ----


@dataclass
class Gate:
    """A logits hook at which the model waits: what comes meanwhile came during a round."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)
    armed: bool = False

    def __call__(self, logits: Any, context: LogitsContext) -> Any:
        if self.armed:
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
    assert [(done.command_seq, done.result.rows[0].request_id) for done in ran] == [(1, "a"), *[(3, "c")] * 3]
    assert {h.request_id: h.output_tokens for h in held} == {"a": 1, "b": 0, "c": 3}


async def test_a_round_that_got_nowhere_is_not_repeated_before_another_command(tiny: Tiny) -> None:
    async with a_runner(tiny, blocks=40) as runner:
        report, following = reporter()
        runner.attach(100, report)
        big = Admission("big", 1, list(range(5, 325)), 320, Sampling(), Limits(99, ignore_eos=True))
        runner.post(Command(1, 0, [Run("big", 0, 400)], admit=[big]))
        assert (await asyncio.to_thread(following)).result.rows[0].tokens  # all 40 blocks are full now
        assert (await asyncio.to_thread(following)).result.rows[0].skipped
        runner.post(Command(2, 2, [Run("big", 0, 400)]))  # the same again
        await asyncio.to_thread(wait_until, lambda: not runner._pending)  # taken in before the next one comes
        runner.post(Command(3, 2, [Run("big", 0, 400), Run("a", 0, 64)], admit=[admission("a")], forget=["big"]))
        after = await asyncio.to_thread(following)
    assert (after.step, after.command_seq) == (3, 3)


async def test_no_round_begins_after_detach(tiny: Tiny) -> None:
    async with a_runner(tiny) as runner:
        report, following = reporter()
        runner.attach(10_000, report)
        runner.post(Command(1, 0, [Run("a", 0, 64)], admit=[admission("a", 900)]))
        await asyncio.to_thread(following)
        first = await asyncio.wait_for(asyncio.wrap_future(runner.detach()), DEADLINE_S)
        second = await asyncio.wait_for(asyncio.wrap_future(runner.detach()), DEADLINE_S)
    assert first == second


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
