"""One trace over all services, as a collector gets it; and what happens where there is none."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import grpc
import httpx2
import pytest
import structlog
from opentelemetry.sdk.trace.export import SpanExportResult
from starlette.responses import Response

from gateway.app import running
from gateway.config import Settings
from gateway.http.access import HttpAccess, route
from gateway.http.app import make_app
from gateway.keys import Right
from gateway.tracing import incoming
from laps_sd.client import AsyncClient
from protos import tracing
from protos.serving import channel
from protos.tracing import Tracing, traceparent
from protos.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.gateway.harness import model_info
from tests.observe.collector import attributes, collector
from tests.scheduler.live import ScriptedGateway, ScriptedWorker, Switch, scheduler
from tests.waiting import WAIT_S, until

STOP = types_pb2.FINISH_REASON_STOP
CALLER = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
UNSAMPLED = CALLER[:-2] + "00"
PROMPT, ANSWER = "the quick brown fox", [40, 41, 42]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "SEND_EVERY_S", 0.01)
    monkeypatch.setattr(tracing, "CLOSE_S", 0.1)


@asynccontextmanager
async def services(store: Switch, endpoint: str, **settings: Any) -> AsyncIterator[tuple[str, ScriptedWorker]]:
    """A scheduler with one worker and a gateway before it, both traced. Yields where the gateway serves gRPC."""
    traces = tracing.make("scheduler", endpoint, 1.0)
    async with scheduler(store, tracing=traces) as (_, target):
        worker = await ScriptedWorker(target).attach(model=model_info())
        async with running(
            Settings(grpc_port=0, http_port=0, scheduler=target, otlp_endpoint=endpoint, **settings)
        ) as served:
            async with AsyncClient(served.grpc) as client:
                await client.ready(WAIT_S)
            yield served.grpc, worker
        await worker.close()
    if traces is not None:
        traces.close()


async def ask(grpc_at: str, worker: ScriptedWorker, parent: str | None = CALLER, **fields: Any) -> None:
    """Ask for one answer, which takes two reports of the worker."""
    async with channel(grpc_at) as gateway:
        request = inference_pb2.GenerateRequest(prompt=PROMPT, request_id="r", max_tokens=9, **fields)
        metadata = (("traceparent", parent),) if parent else ()
        call = inference_pb2_grpc.InferenceStub(gateway).Generate(request, metadata=metadata)
        await worker.until("r")
        await worker.report(worker.row("r", 0, *ANSWER[:2], prefilled=5))
        await worker.report(worker.row("r", 2, ANSWER[2], finish=STOP))
        async with asyncio.timeout(WAIT_S):
            async for _ in call:
                pass


async def test_the_callers_trace_goes_on_in_the_gateway_and_in_the_scheduler(store: Switch) -> None:
    async with collector() as kept, services(store, kept.endpoint) as (at, worker):
        await ask(at, worker, temperature=0.5, seed=7)
        call, queued, running = await kept.until(
            ("laps-sd-gateway", "text_completion tiny"),
            ("laps-sd-scheduler", "queued"),
            ("laps-sd-scheduler", "running 1"),
        )
        assert worker.admitted["r"].traceparent.startswith(f"00-{call.trace_id.hex()}-{call.span_id.hex()}-")
    assert {span.trace_id.hex() for span in (call, queued, running)} == {"a" * 32}
    assert call.parent_span_id.hex() == "b" * 16
    assert queued.parent_span_id == running.parent_span_id == call.span_id
    assert queued.start_time_unix_nano <= queued.end_time_unix_nano <= running.start_time_unix_nano
    told = attributes(call)
    assert told.pop("gen_ai.latency.e2e") >= told.pop("gen_ai.latency.time_to_first_token") > 0
    assert told.pop("gen_ai.latency.time_in_queue") >= 0
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "laps_sd",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": "7",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "r",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": len(worker.admitted["r"].tokens),
        "gen_ai.usage.output_tokens": 3,
    }


async def test_no_text_is_ever_sent(store: Switch) -> None:
    async with collector() as kept, services(store, kept.endpoint) as (at, worker):
        await ask(at, worker)
        await kept.until(("laps-sd-gateway", "text_completion tiny"), ("laps-sd-scheduler", "running 1"))
    assert b"quick" not in kept.raw


async def test_a_call_without_a_trace_begins_one(store: Switch) -> None:
    async with collector() as kept, services(store, kept.endpoint) as (at, worker):
        await ask(at, worker, parent=None)
        call, queued = await kept.until(("laps-sd-gateway", "text_completion tiny"), ("laps-sd-scheduler", "queued"))
    assert not call.parent_span_id
    assert queued.trace_id == call.trace_id


@pytest.mark.parametrize(("parent", "settings"), [(UNSAMPLED, {}), (None, {"trace_ratio": 0.0})])
async def test_a_trace_that_is_not_recorded_costs_nothing_further_on(
    store: Switch, parent: str | None, settings: dict[str, Any]
) -> None:
    async with collector() as kept, services(store, kept.endpoint, **settings) as (at, worker):
        await ask(at, worker, parent=parent)
        assert worker.admitted["r"].traceparent == ""
    assert not kept.spans


async def test_a_refused_call_names_its_error(store: Switch) -> None:
    async with collector() as kept, services(store, kept.endpoint) as (at, _):
        async with channel(at) as gateway:
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in inference_pb2_grpc.InferenceStub(gateway).Generate(
                    inference_pb2.GenerateRequest(prompt=PROMPT, temperature=9)
                ):
                    pass
        (call,) = await kept.until(("laps-sd-gateway", "text_completion"))
    assert attributes(call)["error.type"] == "BAD_INPUT"


async def test_a_request_that_is_sent_again_in_another_trace_is_still_the_same(store: Switch) -> None:
    async with collector() as kept, services(store, kept.endpoint) as (at, worker):
        await ask(at, worker)
        other = CALLER.replace("a", "c")
        async with channel(at) as gateway:
            request = inference_pb2.GenerateRequest(prompt=PROMPT, request_id="r", max_tokens=9)
            call = inference_pb2_grpc.InferenceStub(gateway).Generate(request, metadata=(("traceparent", other),))
            chunks = [chunk async for chunk in call]
        assert [token for chunk in chunks for token in chunk.token_ids] == ANSWER


async def test_a_trace_goes_on_after_the_scheduler_was_started_again(store: Switch) -> None:
    async with scheduler(store) as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("r", traceparent=CALLER, on_disconnect=types_pb2.ON_DISCONNECT_DETACH)
        await worker.until("r")
        await worker.report(worker.row("r", 0, *ANSWER))
        await gateway.until(lambda: gateway.tokens.get("r") == ANSWER)
        await gateway.close()
        await worker.close()
    async with collector() as kept:
        traces = Tracing("scheduler", kept.endpoint)
        async with scheduler(store, tracing=traces) as (_, target):
            worker = await ScriptedWorker(target, "another").attach()
            await worker.until("r")
            assert worker.admitted["r"].traceparent == CALLER
            await worker.report(worker.row("r", 3, 7, finish=STOP))
            (paused,) = await kept.until(("laps-sd-scheduler", "paused 1"))
            await worker.close()
        traces.close()
    assert (paused.trace_id.hex(), paused.parent_span_id.hex()) == ("a" * 32, "b" * 16)


async def test_a_collector_that_is_away_harms_nobody_and_each_service_tells_of_it_once(
    store: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "SEND_TIMEOUT_S", 0.1)
    with structlog.testing.capture_logs() as logs:

        async def both_told() -> bool:
            return [log["event"] for log in logs].count("traces_not_sent") == 2

        async with services(store, "http://127.0.0.1:1") as (at, worker):
            await ask(at, worker)
            await until(both_told)
    assert await both_told()


def test_what_begins_to_fail_and_what_works_again_is_told_once() -> None:
    failed, sent = SpanExportResult.FAILURE, SpanExportResult.SUCCESS
    exporter = Mock(export=Mock(side_effect=[sent, failed, failed, sent, sent, failed]))
    with structlog.testing.capture_logs() as logs:
        telling = tracing._telling(exporter, structlog.get_logger())
        for _ in range(6):
            telling.export([])
    assert [log["event"] for log in logs] == ["traces_not_sent", "traces_sent_again", "traces_not_sent"]


def test_spans_beyond_what_may_wait_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_QUEUE", 8)
    monkeypatch.setattr(tracing, "BATCH", 8)
    traces = Tracing("scheduler", "http://127.0.0.1:1")
    for _ in range(1000):
        traces.span(CALLER, "queued", 1.0, 2.0)
    assert len(traces._processor._batch_processor._queue) <= 8
    traces.close()


async def test_over_http_the_header_is_continued() -> None:
    """Whatever path answers: the header is read beside the key."""
    seen: list[str] = []

    async def handler(_: object) -> Response:
        seen.append(incoming.get())
        return Response()

    access = HttpAccess(None, 1, strangers=False)
    app = make_app([route("/x", handler, right=Right.GENERATE)], access, most_body_bytes=0)
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
        await client.get("/x", headers={"traceparent": CALLER})
        await client.get("/x", headers={"traceparent": "nonsense"})
    assert seen == [CALLER, ""]


@pytest.mark.parametrize(
    "bad", [None, "", "x", CALLER + "-more", CALLER.upper(), CALLER.replace("a", "0"), "01" + CALLER[2:]]
)
def test_a_header_that_is_not_valid_begins_a_trace(bad: str | None) -> None:
    assert traceparent(bad) == ""


def test_without_a_collector_nothing_is_imported() -> None:
    code = "import sys, gateway.front, scheduler_service.timelines; from protos import tracing; "
    code += "assert tracing.make('x', '', 1.0) is None; assert 'opentelemetry' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)


def test_the_environments_own_variable_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    made = tracing.make("gateway", "", 1.0)
    assert made is not None
    made.close()
