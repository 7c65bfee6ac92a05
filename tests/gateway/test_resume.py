"""Streams that are taken up again, requests that are sent again, and clients that outlive their gateway."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from typing import Any
from unittest import mock

import grpc
import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.app import Gateway
from gateway.feed import BEYOND
from gateway.text import TextModel
from laps_sd.client import AsyncClient, Collector, Usage
from protos.errors import BeyondEnd, DuplicateRequest, Lost, NotServing, RequestError, UnknownRequest
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as pb
from protos.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.gateway.harness import WAIT_S, Link, Scheduler, ending, gateway, ids, model_info, stack
from tests.gateway.test_cli import generate, output
from tests.gateway.test_stream import begin, finish
from tests.waiting import until

TEXT = "the naïve 狐 jumps"  # characters of several tokens
TOKENS = ids(TEXT)
DETACH = {"on_disconnect": "detach"}


def submission(id: str = "r", **fields: Any) -> pb.Submit:
    limits = common_pb.Limits(max_tokens=40, stop=fields.pop("stop", []))
    return pb.Submit(request_id=id, prompt=[1, 2, 3], limits=limits, tenant="default", **fields)


async def collect(chunks: AsyncIterator[Any], collector: Collector | None = None) -> Collector:
    collector = collector or Collector()
    async for chunk in chunks:
        collector.add(chunk)
    return collector


async def relay_all(link: Link, submit: pb.Submit, rounds: int = 2, **fields: Any) -> None:
    """What a scheduler sends to whoever follows from the beginning: rounds of that many tokens, then the end."""
    for start in range(0, len(TOKENS), rounds):
        await link.delta(submit, start, TOKENS[start : start + rounds], drafted=4, accepted=1)
    await link.delta(submit, len(TOKENS), ending=ending(**fields))


async def begun(link: Link, client: AsyncClient, tokens: int, **params: Any) -> tuple["asyncio.Task[Collector]", Any]:
    """A stream of which the client has that many tokens."""
    collector = Collector()
    task = asyncio.create_task(collect(client.generate("the fox", **params), collector))
    submit = await link.accept()
    await link.delta(submit, 0, TOKENS[:tokens])

    async def there() -> bool:
        return len(collector.token_ids) == tokens

    await until(there)
    return task, submit


async def answered_meanwhile(client: AsyncClient, link: Link) -> None:
    """Another request: when it has ended the gateway has read all that was said before."""
    other, submit = await begin(client, link)
    await link.delta(submit, 0, [40], ending=ending())
    await finish(other)


@pytest.mark.parametrize("stop", [[], ["mps"]])
async def test_from_any_token_on_text_and_statistics_go_on_as_if_nothing_had_happened(stop: list[str]) -> None:
    async with stack() as (scheduler, link, client):
        submit = scheduler.submitted["r"] = submission(stop=stop)
        for offset in range(len(TOKENS) + 1):
            task = asyncio.create_task(collect(client.resume("r", offset)))
            follow = await link.next("follow")
            assert (follow.request_id, follow.offset) == ("r", 0)
            await relay_all(link, submit)
            resumed = await finish(task)
            assert resumed.token_ids == TOKENS[offset:]
            detokenizer = TextModel(model_info()).detokenizer(stop)
            detokenizer.push(TOKENS[:offset])
            assert "".join(resumed.text) == detokenizer.push(TOKENS[offset:]) + detokenizer.finish()
            answer = resumed.completion()
            assert answer.usage == Usage(3, len(TOKENS))
            assert answer.spec_decode.num_draft_tokens == 4 * -(-len(TOKENS) // 2)


async def figures(served: Gateway) -> dict[str, float]:
    """Of answers, as the gateway's metrics tell them."""
    async with httpx2.AsyncClient() as http:
        told = (await http.get(f"http://{served.http}/metrics")).text
    samples = [sample for family in text_string_to_metric_families(told) for sample in family.samples]
    answers = r".*(success|_tokens|_token_seconds|_latency_seconds)_(total|count|sum)"
    return {sample.name: sample.value for sample in samples if re.fullmatch(answers, sample.name)}


async def test_an_answer_that_is_read_again_counts_as_no_other_request() -> None:
    async with AsyncExitStack() as opened:
        scheduler = Scheduler()
        await scheduler.start()
        opened.push_async_callback(scheduler.stop)
        served = await opened.enter_async_context(gateway(scheduler))
        client = await opened.enter_async_context(AsyncClient(served.grpc, max_retries=0))
        link = await scheduler.link()
        await client.ready(WAIT_S)
        task, submit = await begin(client, link)
        await relay_all(link, submit)
        await finish(task)
        counted = await figures(served)
        assert counted["laps_sd_request_success_total"] == counted["laps_sd_time_to_first_token_seconds_count"] == 1
        scheduler.submitted[submit.request_id] = submit
        again = asyncio.create_task(collect(client.resume(submit.request_id)))
        await link.next("follow")
        await relay_all(link, submit)
        await again
        assert await figures(served) == counted


async def test_an_answer_of_another_model_is_not_told_by_this_ones_tokenizer() -> None:
    async with stack() as (scheduler, _, client):
        scheduler.submitted["r"] = submission(model_fingerprint="another")
        with pytest.raises(Lost, match="served no more"):
            await collect(client.resume("r"))


async def test_an_unknown_request_is_not_found() -> None:
    async with stack() as (_, _, client):
        with pytest.raises(UnknownRequest, match="nobody"):
            await collect(client.resume("nobody"))


async def test_an_offset_beyond_the_end_is_out_of_range() -> None:
    async with stack() as (scheduler, link, client):
        submit = scheduler.submitted["r"] = submission()
        task = asyncio.create_task(collect(client.resume("r", len(TOKENS) + 1)))
        await link.next("follow")
        await relay_all(link, submit)
        with pytest.raises(BeyondEnd, match=f"ended at token {len(TOKENS)}, and {len(TOKENS) + 1} is beyond it"):
            await finish(task)


async def test_a_resumed_stream_survives_the_scheduler_too() -> None:
    async with stack() as (scheduler, link, client):
        submit = scheduler.submitted["r"] = submission()
        task = asyncio.create_task(collect(client.resume("r", 1)))
        await link.next("follow")
        await link.delta(submit, 0, TOKENS[:3])
        link.cut.set()
        link = await scheduler.link()
        assert (await link.next("follow")).offset in (0, 3)
        await relay_all(link, submit)
        assert (await finish(task)).token_ids == TOKENS[1:]


async def test_live_rounds_before_those_that_were_asked_for_are_no_gap() -> None:
    async with stack() as (_, link, client):
        first, submit = await begun(link, client, 4, request_id="mine")
        second = asyncio.create_task(collect(client.generate("the fox", request_id="mine")))
        await link.next("follow")
        await link.delta(submit, 4, TOKENS[4:5])
        await link.delta(submit, 5, TOKENS[5:6])
        await relay_all(link, submit)
        assert (await finish(first)).token_ids == (await finish(second)).token_ids == TOKENS
        assert link.received.empty()


async def test_a_chat_that_is_sent_again_after_midnight_is_the_same_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its template writes the date, and so its tokens are others."""
    clock = mock.Mock(now=lambda: datetime(2026, 11, 22, 23, 59))
    monkeypatch.setattr("gateway.text.datetime", clock)
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "the fox"}], "request_id": "mine"}
    async with stack(template="{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}") as (_, link, client):
        first = asyncio.create_task(client.complete(**chat))
        submit = await link.accept()
        await answered_meanwhile(client, link)
        clock.now = lambda: datetime(2026, 11, 23, 0, 1)
        second = asyncio.create_task(client.complete(**chat))
        assert (await link.next("follow")).request_id == "mine"
        chat["messages"][0]["content"] = "the dog"
        with pytest.raises(DuplicateRequest):
            await client.complete(**chat)
        await relay_all(link, submit)
        assert (await finish(first)).token_ids == (await finish(second)).token_ids == TOKENS


async def test_the_same_id_with_other_content_is_refused_and_the_first_goes_on() -> None:
    async with stack() as (_, link, client):
        first, submit = await begun(link, client, 4, request_id="mine")
        with pytest.raises(DuplicateRequest, match="request_id: mine is taken"):
            await client.complete("the dog", request_id="mine")
        await relay_all(link, submit)
        assert (await finish(first)).token_ids == TOKENS


async def test_a_request_that_is_to_be_submitted_again_later_is_submitted_by_who_joins_it() -> None:
    async with stack() as (scheduler, link, client):
        first = asyncio.create_task(client.complete("the fox", request_id="mine"))
        await link.next("submit")
        link.cut.set()
        link = await scheduler.link()
        submit = await link.next("submit")
        refusal = {"code": NotServing.code.value[0], "message": "no warmed worker", "retry_after_s": 60}
        await link.send(refusals=[pb.Refusal(request_id="mine", **refusal)])
        await client.ready(WAIT_S)
        await answered_meanwhile(client, link)
        second = asyncio.create_task(client.complete("the fox", request_id="mine"))
        assert (await link.accept()).request_id == "mine"
        await relay_all(link, submit)
        assert (await finish(first)).token_ids == (await finish(second)).token_ids == TOKENS


async def test_a_request_that_is_resumed_and_a_stranger_under_its_id_are_kept_apart() -> None:
    """None is told the other's tokens, nor the other's refusal. (Simulated faults, seed 661.)"""
    async with stack() as (scheduler, link, client):
        submit = scheduler.submitted["r"] = submission()
        stranger = asyncio.create_task(client.complete("something else", request_id="r"))
        await link.next("submit")
        task = asyncio.create_task(collect(client.resume("r")))
        await link.next("follow")
        with pytest.raises(DuplicateRequest, match="another request"):
            await finish(stranger)
        code = DuplicateRequest.code.value[0]
        await link.send(refusals=[{"request_id": "r", "code": code, "message": "request_id: r was used before"}])
        assert (await link.next("follow")).offset == 0  # it may have been the stranger whom the scheduler had us follow
        await relay_all(link, submit)
        assert (await finish(task)).token_ids == TOKENS


async def test_a_request_is_cancelled_when_the_last_of_its_streams_is_left() -> None:
    async with stack() as (_, link, client):
        first, submit = await begun(link, client, 4, request_id="mine")
        second = client.generate("the fox", request_id="mine")
        begins = asyncio.ensure_future(anext(second))
        await link.next("follow")
        first.cancel()
        await link.delta(submit, 0, TOKENS[:6])
        await asyncio.wait_for(begins, WAIT_S)
        assert link.received.empty()
        await second.aclose()
        assert (await link.next("follow")).offset == BEYOND  # to hear of its end
        assert (await link.next("cancel")).request_id == "mine"


async def test_nothing_is_acknowledged_before_it_is_durable() -> None:
    async with stack() as (_, link, client):
        stub = inference_pb2_grpc.InferenceStub(client._to(0).channel)
        call = stub.Generate(inference_pb2.GenerateRequest(prompt="a"), timeout=WAIT_S)
        acknowledged = asyncio.ensure_future(call.initial_metadata())
        submit = await link.next("submit")
        await client.stats()  # time enough to say something
        assert not acknowledged.done()
        await link.send(accepted=[submit.request_id])
        assert dict(await acknowledged)["x-request-id"] == submit.request_id
        call.cancel()


async def test_a_detached_request_whose_client_hangs_up_unacknowledged_survives_a_broken_link() -> None:
    async with stack() as (scheduler, link, client):
        task = asyncio.create_task(client.complete("the fox", **DETACH))
        submit = await link.next("submit")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        other, marker = await begin(client, link)  # by now the gateway knows that the client is gone
        link.cut.set()
        link = await scheduler.link()
        again = {(await asyncio.wait_for(link.received.get(), WAIT_S)).submit.request_id for _ in range(2)}
        assert submit.request_id in again
        # Of the other one, too: what was said of it may have been lost with the link.
        await link.send(accepted=[submit.request_id, marker.request_id])
        await link.delta(marker, 0, [40], ending=ending())
        await finish(other)
        link.cut.set()
        link = await scheduler.link()
        await client.ready(WAIT_S)
        other, _ = await begin(client, link)  # and no more of the detached one, which is durable
        other.cancel()


@asynccontextmanager
async def two_gateways() -> AsyncIterator[tuple[Scheduler, list[Link], list[Any], AsyncClient]]:
    """And a client of both, the first one first."""
    scheduler = Scheduler()
    await scheduler.start()
    async with gateway(scheduler) as first:
        links = [await scheduler.link()]
        async with gateway(scheduler) as second:
            links.append(await scheduler.link())
            for served in (first, second):
                async with AsyncClient(served.grpc, max_retries=0) as probe:
                    await probe.ready(WAIT_S)
            async with AsyncClient(f"{first.grpc},{second.grpc}", max_retries=0) as client:
                yield scheduler, links, [first, second], client
    await scheduler.stop()


async def test_a_detached_stream_goes_on_at_another_gateway_when_its_own_is_lost() -> None:
    async with two_gateways() as (scheduler, (link, other), (first, _), client):
        task, submit = await begun(link, client, 4, **DETACH)
        scheduler.submitted[submit.request_id] = submit
        await first.server.stop(0)
        assert (await other.next("follow")).request_id == submit.request_id
        await relay_all(other, submit)
        got = await finish(task)
        assert (got.token_ids, "".join(got.text)) == (TOKENS, TEXT)


async def test_a_detached_submission_is_sent_again_under_its_id_when_its_answer_is_lost() -> None:
    async with two_gateways() as (_, (link, other), (first, _), client):
        task = asyncio.create_task(client.complete("the fox", **DETACH))
        submit = await link.next("submit")
        await first.server.stop(0)
        again = await other.accept()
        again.timeout_s = submit.timeout_s  # each attempt has its own
        assert again == submit
        await relay_all(other, submit)
        assert (await finish(task)).token_ids == TOKENS


async def test_a_stream_that_is_looked_for_when_its_gateway_stops_is_looked_for_at_another() -> None:
    async with two_gateways() as (scheduler, (_, other), (first, _), client):
        scheduler.submitted["r"], scheduler.silent = submission(), asyncio.Event()
        task = asyncio.create_task(collect(client.resume("r")))
        await asyncio.wait_for(scheduler.asked.wait(), WAIT_S)
        stub = inference_pb2_grpc.InferenceStub(client._to(0).channel)
        plain = stub.Resume(inference_pb2.ResumeRequest(request_id="r"), timeout=WAIT_S)
        scheduler.asked.clear()
        await asyncio.wait_for(scheduler.asked.wait(), WAIT_S)
        await first.front.drain(0, 0)
        assert await plain.code() is grpc.StatusCode.UNAVAILABLE
        scheduler.silent.set()
        assert (await other.next("follow")).request_id == "r"
        await relay_all(other, submission())
        assert (await finish(task)).token_ids == TOKENS


class Proxy(inference_pb2_grpc.InferenceServicer):
    """Stops under its first call, as proxies and servers do: with status CANCELLED. The next one is answered."""

    def __init__(self) -> None:
        self.calls = 0

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override] # noqa: N802
        self.calls += 1
        if self.calls == 1:
            await context.abort(grpc.StatusCode.CANCELLED, "Cancelling all calls")
        await context.write(inference_pb2.GenerateResponse(request_id=request.request_id, final={}))


async def test_a_call_that_the_other_side_cancels_is_a_broken_one() -> None:
    server, proxy = grpc.aio.server(), Proxy()
    inference_pb2_grpc.add_InferenceServicer_to_server(proxy, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}", max_retries=0) as client:
        assert (await client.complete("the fox", request_id="r", **DETACH)).request_id == "r"
        proxy.calls = 0
        with pytest.raises(NotServing):
            await client.complete("the fox")
    await server.stop(0)


async def test_an_attached_stream_is_not_looked_for() -> None:
    async with two_gateways() as (_, (link, other), (first, _), client):
        task, _ = await begun(link, client, 4)
        await first.server.stop(0)
        with pytest.raises(RequestError):
            await finish(task)
        assert other.received.empty()


async def test_a_detached_stream_whose_request_is_gone_ends_with_an_error() -> None:
    async with two_gateways() as (_, (link, _), (first, _), client):
        task, _ = await begun(link, client, 4, **DETACH)
        await first.server.stop(0)
        with pytest.raises(UnknownRequest):
            await finish(task)


async def test_the_command_goes_on_where_another_left_off() -> None:
    async with stack() as (scheduler, link, client):
        process = await generate(client.target, "--raw", "--detach", "--request-id", "mine")
        submit = scheduler.submitted["mine"] = await link.accept()
        assert submit.on_disconnect == types_pb2.ON_DISCONNECT_DETACH
        process.terminate()
        await output(process)
        process = await generate(client.target, command=("resume", "mine", "--offset", "4"))
        assert (await link.next("follow")).request_id == "mine"
        await relay_all(link, submit)
        code, out, _ = await output(process)
        assert code == 0
        assert out.endswith("jumps\n")
        assert len(out) < len(TEXT)
