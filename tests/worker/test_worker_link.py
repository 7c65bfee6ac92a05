"""The worker's side of the step protocol, against a scripted scheduler on a real gRPC stream."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from protos import serving, version
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import worker_link_pb2 as pb
from protos.link.v1.worker_link_pb2_grpc import add_WorkerLinkServicer_to_server
from protos.serving import LINK_MESSAGE_BYTES, Server
from protos.tls import Tls
from protos.v1 import types_pb2
from tests.worker.harness import Tiny
from tests.worker.scripted import DEADLINE_S, HOST_BLOCKS, Attachment, ScriptedScheduler, a_runner, admit
from worker_service import link as link_module
from worker_service.engine.cost_model import CostModel
from worker_service.engine.types import CostProfile, StepResult
from worker_service.link import Link
from worker_service.wire import of_cost

TOKENIZER = bytes(range(256)) * 3000


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

    async with (
        asyncio.timeout(DEADLINE_S),
        a_runner(tiny) as runner,
        await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0) as silent,
    ):
        hung = "{}:{}".format(*silent.sockets[0].getsockname())
        link = Link(
            ["127.0.0.1:1", hung, f"127.0.0.1:{port}"],  # nobody is at the first, and the second never answers
            tls=Tls(),
            runner=runner,
            hello=pb.Hello(
                worker_id="w0",
                model=common_pb.ModelInfo(name="tiny", tokenizer_json=TOKENIZER),
                slots=2,
                blocks=256,
                block_tokens=8,
                host_blocks=HOST_BLOCKS,
                max_draft=8,
            ),
            on_attached=on_attached,
            on_drain=scheduler.worker_told_to_drain.set,
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


async def test_one_that_does_not_answer_keeps_it_from_no_other(
    scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it comes back after a session. No wait for it would end within this test."""
    monkeypatch.setattr(serving, "DIAL_S", 10 * DEADLINE_S)
    for _ in range(2):
        attachment = await scheduler.attached()
        await attachment.welcome()
        await attachment.heartbeat()
        attachment.hang_up.set()


async def test_hello_says_what_the_worker_is(scheduler: ScriptedScheduler) -> None:
    hello = (await scheduler.attached()).hello
    assert (hello.protocol, hello.worker_id, hello.slots, hello.blocks, hello.block_tokens) == (
        version.CURRENT,
        "w0",
        2,
        256,
        8,
    )
    assert (hello.host_blocks, hello.cost.offload_block_s > 0) == (HOST_BLOCKS, True)
    assert hello.session
    assert hello.cost.verify_s > 0
    assert hello.model.name == "tiny"


async def test_the_tokenizer_is_left_out_until_the_scheduler_asks_for_it(scheduler: ScriptedScheduler) -> None:
    attachment = await scheduler.attached()
    said = attachment.hello
    assert (said.min_protocol, said.tokenizer_bytes, said.model.tokenizer_json) == (3, len(TOKENIZER), b"")
    assert await attachment.tokenizer(len(TOKENIZER)) == TOKENIZER
    await attachment.welcome()
    await attachment.heartbeat()


async def test_an_older_scheduler_refuses_once_and_gets_the_tokenizer_with_the_next_greeting(
    scheduler: ScriptedScheduler,
) -> None:
    """Until a newer one has taken over."""
    first = await scheduler.attached()
    scheduler.older = True
    first.hang_up.set()
    second = await scheduler.attached()
    assert (second.hello.min_protocol, second.hello.tokenizer_bytes) == (2, 0)
    assert second.hello.model.tokenizer_json == TOKENIZER
    await second.welcome(protocol=2)
    await second.heartbeat()
    second.hang_up.set()
    third = await scheduler.attached()
    assert third.hello.model.tokenizer_json == TOKENIZER
    scheduler.older = False
    await third.welcome()
    await third.heartbeat()
    third.hang_up.set()
    assert (await scheduler.attached()).hello.model.tokenizer_json == b""


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


async def test_rounds_that_merely_go_on_share_a_report_if_the_command_allows_it(scheduler: ScriptedScheduler) -> None:
    attachment = await scheduler.attached()
    await attachment.welcome()
    await attachment.command(["a"], [admit("a", max_tokens=6)], draft_len=0, report_within_s=60)
    first, rest = await attachment.report(), await attachment.report()
    assert (first.step, first.rows[0].start, list(first.rows[0].tokens_per_round)) == (1, 0, [])
    assert (rest.step, rest.rows[0].start, list(rest.rows[0].tokens_per_round)) == (6, 1, [1] * 5)
    assert rest.rows[0].finish == types_pb2.FINISH_REASON_LENGTH


async def test_the_worker_runs_at_most_max_lag_rounds_ahead(scheduler: ScriptedScheduler) -> None:
    attachment = await scheduler.attached()
    await attachment.welcome(max_lag=3)
    await attachment.command(["a"], [admit("a")], draft_len=0)
    assert [(await attachment.report()).step for _ in range(3)] == [1, 2, 3]
    assert (await attachment.heartbeat()).step == 3
    await attachment.command(["a"], seen_step=2, draft_len=0)
    resumed = [await attachment.report() for _ in range(2)]
    assert [report.step for report in resumed] == [4, 5]
    assert resumed[0].idle_s > 0.01  # it waited for more than a heartbeat, with work at hand
    assert (await attachment.heartbeat()).step == 5


async def test_a_worker_that_is_told_to_go_hears_it(scheduler: ScriptedScheduler) -> None:
    attachment = await scheduler.attached()
    await attachment.welcome()
    await attachment.drain()
    await scheduler.worker_told_to_drain.wait()


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

    def observe(model: CostModel, result: StepResult) -> CostProfile | None:
        first = model.profile != slower
        model.profile = slower
        return slower if first else None

    monkeypatch.setattr(CostModel, "observe", observe)
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
    monkeypatch.setattr("protos.silence.SILENT_S", 0.1)
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
