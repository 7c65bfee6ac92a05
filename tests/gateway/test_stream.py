"""Generate from end to end against a scripted scheduler: chunks, endings, refusals, disconnects, deadlines."""

import asyncio
from itertools import accumulate
from typing import Any

import grpc
import pytest

from gateway import validate
from laps_sd.client import AsyncClient, Completion, Usage
from protos.errors import BadInput, DeadlinePassed, Failed, QueueFull, RequestError, UnknownRequest
from protos.v1 import inference_pb2, inference_pb2_grpc, status_pb2, types_pb2
from tests.gateway.harness import WAIT_S, Link, Scheduler, ending, gateway, ids, stack
from tests.waiting import until


async def begin(client: Any, link: Link, **params: Any) -> tuple["asyncio.Task[Completion]", Any]:
    """A running `complete` and the accepted submission."""
    task = asyncio.create_task(client.complete("the fox", **params))
    return task, await link.accept()


async def finish(task: "asyncio.Task[Completion]") -> Completion:
    return await asyncio.wait_for(task, WAIT_S)


async def test_text_streams_before_the_answer_is_whole() -> None:
    async with stack() as (_, link, client):
        stream = client.generate("the fox")
        first = asyncio.ensure_future(anext(stream))
        submit = await link.accept()
        await link.delta(submit, 0, ids("jumps"), drafted=4, accepted=3)
        chunk = await asyncio.wait_for(first, WAIT_S)
        assert (chunk.text, list(chunk.token_ids), chunk.offset) == ("jumps", ids("jumps"), 0)
        assert chunk.request_id == submit.request_id
        assert chunk.final is None
        await stream.aclose()


async def test_an_answer_carries_its_statistics() -> None:
    async with stack() as (_, link, client):
        task, submit = await begin(client, link)
        tokens = ids("jumps 123")
        await link.delta(submit, 0, tokens[:1])
        await link.delta(submit, 1, tokens[1:3], drafted=4, accepted=1)
        end = ending(types_pb2.FINISH_REASON_LENGTH, queue_ms=12.5, preemptions=2, rounds=3)
        await link.delta(submit, 3, tokens[3:], drafted=4, accepted=0, ending=end)
        done = await finish(task)
        assert (done.text, done.token_ids, done.finish_reason) == ("jumps 123", tokens, "length")
        assert done.usage == Usage(len(submit.prompt), len(tokens))
        spec = done.spec_decode
        assert (spec.num_drafts, spec.num_draft_tokens, spec.num_accepted_tokens) == (2, 8, 1)
        assert spec.accepted_per_round == [1, 0]
        assert (done.timings_ms.queue, done.preemptions) == (12.5, 2)


async def test_counts_that_no_worker_would_report_break_no_stream() -> None:
    most = 2**32 - 1
    async with stack() as (_, link, client):
        task, submit = await begin(client, link)
        tokens = ids("jumps 1")
        await link.delta(submit, 0, tokens[:1], drafted=most, accepted=most)
        end = ending(types_pb2.FINISH_REASON_LENGTH)
        await link.delta(submit, 1, tokens[1:], drafted=most, accepted=most, ending=end)
        spec = (await finish(task)).spec_decode
        assert (spec.num_draft_tokens, spec.num_accepted_tokens) == (2 * most, 2 * most)


async def test_a_stop_string_is_no_part_of_the_text() -> None:
    async with stack() as (_, link, client):
        task, submit = await begin(client, link, stop=["dog"])
        await link.delta(submit, 0, ids("the d"))
        await link.delta(submit, len(ids("the d")), ids("og"), ending=ending())
        assert (await finish(task)).text == "the "


async def test_deltas_that_come_together_are_one_chunk() -> None:
    async with stack() as (_, link, client):
        stream = client.generate("the fox", max_tokens=50)
        first = asyncio.ensure_future(anext(stream))
        submit = await link.accept()
        deltas = [{"request_id": submit.request_id, "start": i, "tokens": [40]} for i in range(50)]
        await link.send(deltas=[*deltas[:-1], {**deltas[-1], "ending": ending()}])
        chunks = [await asyncio.wait_for(first, WAIT_S), *[chunk async for chunk in stream]]
        assert len(chunks) == 1
        assert (len(chunks[0].token_ids), len(chunks[0].rounds)) == (50, 50)


async def test_what_a_slow_reader_misses_grows_into_one_chunk() -> None:
    scheduler = Scheduler()
    scheduler.serving.model.context_tokens = 1_000_000
    await scheduler.start()
    async with gateway(scheduler, max_unread_tokens=10**6) as served, AsyncClient(served.grpc, max_retries=0) as client:
        link = await scheduler.link()
        await client.ready(WAIT_S)
        narrow = grpc.aio.insecure_channel(
            served.grpc, options=[("grpc.http2.bdp_probe", 0)]
        )  # its window stays 64 KiB
        stub = inference_pb2_grpc.InferenceStub(narrow)
        call = stub.Generate(inference_pb2.GenerateRequest(prompt="a", max_tokens=100_000), timeout=WAIT_S)
        submit = await link.accept()
        count, size = 1000, 100
        for start in range(0, count * size, size):
            end = ending() if start == (count - 1) * size else None
            await link.delta(submit, start, [40] * size, ending=end)

        async def all_taken() -> bool:
            return not served.link.feeds

        await until(all_taken)  # and nothing of it was read
        chunks = [chunk async for chunk in call]
        await narrow.close()
    await scheduler.stop()
    assert sum(len(chunk.token_ids) for chunk in chunks) == count * size
    assert [chunk.offset for chunk in chunks[1:]] == list(accumulate(len(chunk.token_ids) for chunk in chunks[:-1]))
    assert max(len(chunk.token_ids) for chunk in chunks) > 10 * size


async def test_the_request_id_is_in_the_initial_metadata() -> None:
    async with stack() as (_, link, client):
        stub = inference_pb2_grpc.InferenceStub(client._to(0).channel)
        call = stub.Generate(inference_pb2.GenerateRequest(prompt="a"), timeout=WAIT_S)
        submit = await link.accept()
        assert dict(await call.initial_metadata())["x-request-id"] == submit.request_id
        call.cancel()


async def test_a_cancelled_request_ends_with_a_last_chunk() -> None:
    async with stack() as (_, link, client):
        task, submit = await begin(client, link)
        await client.cancel(submit.request_id)
        assert (await link.next("cancel")).request_id == submit.request_id
        await link.delta(submit, 0, ending=ending(types_pb2.FINISH_REASON_CANCELLED))
        assert (await finish(task)).finish_reason == "cancelled"


@pytest.mark.parametrize(
    ("reason", "error"),
    [(types_pb2.FINISH_REASON_DEADLINE, DeadlinePassed), (types_pb2.FINISH_REASON_ERROR, Failed), (99, Failed)],
)
async def test_an_ending_that_is_no_answer_is_a_status(reason: int, error: type[RequestError]) -> None:
    async with stack() as (_, link, client):
        task, submit = await begin(client, link)
        await link.delta(submit, 0, ending=ending(reason, message="it broke"))
        with pytest.raises(error):
            await finish(task)


async def test_a_structure_that_fails_in_mid_answer_is_the_requests_own() -> None:
    async with stack() as (_, link, client):
        task, submit = await begin(client, link)
        end = ending(types_pb2.FINISH_REASON_ERROR, message="structure: too many items")
        await link.delta(submit, 0, ids("jumps"), ending=end)
        with pytest.raises(BadInput, match="structure: too many items"):
            await finish(task)


@pytest.mark.parametrize("reason", [types_pb2.FINISH_REASON_DEADLINE, types_pb2.FINISH_REASON_ERROR])
async def test_tokens_that_come_with_such_an_ending_are_told_before_it(reason: int) -> None:
    async with stack() as (_, link, client):
        stream = client.generate("the fox")
        first = asyncio.ensure_future(anext(stream))
        submit = await link.accept()
        await link.delta(submit, 0, ids("jumps"), ending=ending(reason))
        chunk = await asyncio.wait_for(first, WAIT_S)
        assert (chunk.text, chunk.final) == ("jumps", None)
        with pytest.raises(RequestError):
            await asyncio.wait_for(anext(stream), WAIT_S)


async def test_a_refusal_keeps_its_hint() -> None:
    async with stack() as (_, link, client):
        task = asyncio.create_task(client.complete("a"))
        submit = await link.next("submit")
        code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        refusal = {"request_id": submit.request_id, "code": code, "message": "full", "retry_after_s": 0.7}
        await link.send(refusals=[refusal])
        with pytest.raises(QueueFull, match="full") as refused:
            await finish(task)
        assert refused.value.retry_after_ms == 700


async def test_a_mistake_of_the_gateways_own_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(validate, "submission", broken)
    async with (
        stack() as (scheduler, _, _),
        gateway(scheduler) as served,
        AsyncClient(served.grpc, max_retries=0) as client,
    ):
        await client.ready(WAIT_S)
        with pytest.raises(Failed, match="internal error"):
            await client.complete("a")
        assert served.front._metrics.requests == {"INTERNAL": 1}


async def test_live_requests_are_bounded() -> None:
    async with stack(max_requests=1) as (_, link, client):
        task, submit = await begin(client, link)
        with pytest.raises(QueueFull) as refused:
            await client.complete("one too many")
        assert refused.value.retry_after_ms == 1000
        await link.delta(submit, 0, [40], ending=ending())
        await finish(task)
        again, submit = await begin(client, link)
        await link.delta(submit, 0, [40], ending=ending())
        await finish(again)


async def test_a_client_that_hangs_up_cancels() -> None:
    async with stack() as (_, link, client):
        task, submit = await begin(client, link)
        task.cancel()
        assert (await link.next("cancel")).request_id == submit.request_id


async def test_a_client_that_hangs_up_on_a_detached_request_leaves_it_running() -> None:
    async with stack() as (_, link, client):
        task, _ = await begin(client, link, on_disconnect="detach")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        # What the gateway says next is the next request's submission: no cancel came before it.
        other, submit = await begin(client, link)
        await link.delta(submit, 0, [40], ending=ending())
        await finish(other)
        assert link.received.empty()


@pytest.mark.parametrize(("settings", "params"), [({"request_timeout_s": 3.0}, {}), ({}, {"timeout_s": 3.0})])
async def test_a_deadline_goes_to_the_scheduler_and_holds_here_too(
    settings: dict[str, Any], params: dict[str, Any]
) -> None:
    async with stack(**settings) as (_, link, client):
        task, submit = await begin(client, link, **params)
        assert 0 < submit.timeout_s < 3.5  # gRPC rounds up
        with pytest.raises(DeadlinePassed):
            await finish(task)
        assert (await link.next("cancel")).request_id == submit.request_id


async def test_a_calls_own_deadline_is_the_requests() -> None:
    async with stack() as (_, link, client):
        long, distant = await begin(client, link)
        short, near = await begin(client, link, timeout_s=WAIT_S)
        assert 0 < near.timeout_s < 2 * WAIT_S < 3000 < distant.timeout_s
        long.cancel()
        short.cancel()


async def test_status_and_stats_come_from_the_scheduler() -> None:
    async with stack() as (scheduler, _, client):
        scheduler.known["r"] = status_pb2.RequestStatus(
            request_id="r", state=status_pb2.REQUEST_STATE_PAUSED, queue_level=2
        )
        assert (await client.status("r")).queue_level == 2
        assert (await client.stats()).waiting == 3


@pytest.mark.parametrize("call", ["status", "cancel"])
async def test_an_unknown_request_is_not_found(call: str) -> None:
    async with stack() as (_, _, client):
        with pytest.raises(UnknownRequest, match="nobody"):
            await getattr(client, call)("nobody")


async def test_a_request_of_another_gateway_can_be_cancelled() -> None:
    async with stack() as (scheduler, link, client):
        scheduler.known["elsewhere"] = status_pb2.RequestStatus(
            request_id="elsewhere", state=status_pb2.REQUEST_STATE_RUNNING
        )
        await client.cancel("elsewhere")
        assert (await link.next("cancel")).request_id == "elsewhere"
