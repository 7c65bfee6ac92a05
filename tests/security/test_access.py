"""The gateway with API keys: what each key may do, and that nobody hears of another tenant's requests."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from gateway.keys import Right, new_key
from gateway.shares import Shares
from gateway.text import TextModel
from laps_sd.client import AsyncClient
from protos.errors import (
    BadInput,
    DuplicateRequest,
    Forbidden,
    QueueFull,
    RequestError,
    Unauthenticated,
    UnknownRequest,
)
from protos.link.v1 import gateway_link_pb2
from protos.oip import inference_pb2 as oip
from protos.oip import inference_pb2_grpc as oip_grpc
from protos.serving import channel
from protos.v1 import inference_pb2, inference_pb2_grpc, status_pb2
from tests.gateway.harness import WAIT_S, Link, Scheduler, ending, gateway
from tests.gateway.oip.test_open_inference import ask
from tests.waiting import until

MAX_REQUESTS = 10
RIGHTS = {"acme": [Right.GENERATE], "other": [Right.GENERATE], "ops": [Right.ADMIN], "chief": list(Right)}


class Stack:
    def __init__(self, scheduler: Scheduler, link: Link, target: str, keys: dict[str, str], file: Path) -> None:
        self.scheduler, self.link, self.target, self.keys, self.file = scheduler, link, target, keys, file

    def client(self, tenant: str | None) -> AsyncClient:
        return AsyncClient(self.target, api_key=None if tenant is None else self.keys[tenant], max_retries=0)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    made = {tenant: new_key(tenant, rights) for tenant, rights in RIGHTS.items()}
    (tmp_path / "keys").write_text("\n".join(line for _, line in made.values()))
    scheduler = Scheduler()
    await scheduler.start()
    async with gateway(scheduler, api_keys=tmp_path / "keys", max_requests=MAX_REQUESTS) as served:
        link = await scheduler.link()
        async with AsyncClient(served.grpc, max_retries=0) as anybody:
            await anybody.ready(WAIT_S)  # health needs no key
        yield Stack(scheduler, link, served.grpc, {tenant: key for tenant, (key, _) in made.items()}, tmp_path / "keys")
    await scheduler.stop()


CALLS: dict[str, Any] = {
    "Generate": lambda client: client.complete("a"),
    "Resume": lambda client: anext(client.resume("r")),
    "Cancel": lambda client: client.cancel("r"),
    "GetRequest": lambda client: client.status("r"),
    "Stats": lambda client: client.stats(),
    "DrainWorker": lambda client: client.drain_worker("w"),
}


@pytest.mark.parametrize("call", CALLS)
async def test_without_a_key_nothing_is_answered(stack: Stack, call: str) -> None:
    async with stack.client(None) as client:
        with pytest.raises(Unauthenticated, match="send `Bearer KEY`"):
            await CALLS[call](client)
    assert stack.link.received.empty()


async def test_without_a_key_no_name_of_a_model_is_told(stack: Stack) -> None:
    async with channel(stack.target) as link:
        stub = oip_grpc.GRPCInferenceServiceStub(link)
        assert (await stub.ModelReady(oip.ModelReadyRequest(name="tiny"))).ready
        for asked in (oip.ModelReadyRequest(name="other"), oip.ModelReadyRequest(version="7")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ModelReady(asked)
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
            assert "tiny" not in str(refused.value)


@pytest.mark.parametrize(("tenant", "call"), [("acme", "Stats"), ("acme", "DrainWorker"), ("ops", "Generate")])
async def test_a_key_without_the_right_is_told_which_one(stack: Stack, tenant: str, call: str) -> None:
    async with stack.client(tenant) as client:
        with pytest.raises(Forbidden, match="needs the right"):
            await CALLS[call](client)


async def test_the_keys_tenant_goes_with_the_request(stack: Stack) -> None:
    for tenant in ("acme", "other"):
        async with stack.client(tenant) as client:
            answer = asyncio.create_task(client.complete("a"))
            submit = await stack.link.accept()
            assert submit.tenant == tenant
            await stack.link.delta(submit, 0, [40], ending=ending())
            await answer


async def test_a_key_that_is_taken_out_asks_for_nothing_more_on_a_stream_that_is_open(stack: Stack) -> None:
    async with channel(stack.target) as link:
        metadata = [("authorization", f"Bearer {stack.keys['acme']}")]
        call = oip_grpc.GRPCInferenceServiceStub(link).ModelStreamInfer(metadata=metadata)
        await call.write(ask("a", id="before"))
        submit = await stack.link.accept()
        stack.file.write_text("")
        await call.write(ask("a", id="after"))
        await stack.link.delta(submit, 0, [40], ending=ending())
        assert (await call.read()).infer_response.id == "before"  # what runs, runs to its end
        assert await asyncio.wait_for(call.code(), WAIT_S) is grpc.StatusCode.UNAUTHENTICATED
        assert stack.link.received.empty()


async def test_who_administers_sees_the_service(stack: Stack) -> None:
    async with stack.client("ops") as client:
        assert (await client.stats()).waiting == 3


@contextlib.asynccontextmanager
async def a_request_of(stack: Stack, tenant: str) -> AsyncIterator[str]:
    """The id of one that is live."""
    async with stack.client(tenant) as client:
        answer = asyncio.create_task(client.complete("a"))
        submit = await stack.link.accept()
        stack.scheduler.known[submit.request_id] = status_pb2.RequestStatus(
            request_id=submit.request_id, tenant=submit.tenant
        )
        stack.scheduler.submitted[submit.request_id] = submit
        yield submit.request_id
        answer.cancel()


async def test_an_administrator_may_see_and_cancel_everything_without_the_right_to_generate(stack: Stack) -> None:
    async with a_request_of(stack, "acme") as id, stack.client("ops") as administrator:
        assert (await administrator.status(id)).request_id == id
        await administrator.cancel(id)
        assert (await stack.link.next("cancel")).request_id == id
        with pytest.raises(Forbidden, match="needs the right generate"):
            await administrator.complete("a")


async def test_ones_own_request_can_be_asked_for_and_cancelled(stack: Stack) -> None:
    async with a_request_of(stack, "acme") as id, stack.client("acme") as client:
        assert (await client.status(id)).request_id == id
        await client.cancel(id)
        assert (await stack.link.next("cancel")).request_id == id


async def test_whose_requests_passed_ones_own_an_administrator_alone_hears(stack: Stack) -> None:
    async with a_request_of(stack, "acme") as id, stack.client("acme") as owner, stack.client("chief") as administrator:
        stack.scheduler.known[id].passed_by.append("anothers")
        assert (await owner.status(id)).passed_by == []
        assert (await administrator.status(id)).passed_by == ["anothers"]


@pytest.mark.parametrize("call", [AsyncClient.status, AsyncClient.cancel, lambda client, id: anext(client.resume(id))])
async def test_anothers_request_is_as_unknown_as_one_that_never_was(stack: Stack, call: Any) -> None:
    async with a_request_of(stack, "acme") as id, stack.client("other") as client:
        with pytest.raises(UnknownRequest) as refused:
            await call(client, id)
        assert "acme" not in refused.value.message
        assert stack.link.received.empty()


async def test_anothers_text_cannot_be_resumed(stack: Stack) -> None:
    stack.scheduler.submitted["r"] = gateway_link_pb2.Submit(request_id="r", prompt=[1, 2], tenant="acme")
    async with stack.client("other") as client:
        with pytest.raises(UnknownRequest):
            await anext(client.resume("r"))
    assert stack.link.received.empty()


async def test_the_id_of_anothers_live_request_joins_nothing(stack: Stack) -> None:
    async with stack.client("acme") as acme, stack.client("other") as other:
        answer = asyncio.create_task(acme.complete("a", request_id="mine", seed=1))
        await stack.link.accept()
        with pytest.raises(DuplicateRequest):
            await other.complete("a", request_id="mine", seed=1)
        answer.cancel()


async def test_anothers_request_at_another_gateway_is_not_cancelled(stack: Stack) -> None:
    stack.scheduler.known["r"] = status_pb2.RequestStatus(request_id="r", tenant="acme")
    async with stack.client("other") as client:
        with pytest.raises(UnknownRequest):
            await client.cancel("r")
        assert stack.link.received.empty()


DUPLICATE = {"request_id": "theirs", "code": grpc.StatusCode.ALREADY_EXISTS.value[0], "message": "request_id: taken"}


@pytest.mark.parametrize("how", ["cancel", "hang up"])
async def test_submitting_under_anothers_id_cannot_cancel_it(stack: Stack, how: str) -> None:
    async with stack.client("other") as client:
        answer = asyncio.create_task(client.complete("b", request_id="theirs"))
        await stack.link.next("submit")
        if how == "cancel":
            await client.cancel("theirs")
        else:
            answer.cancel()
        await stack.link.send(refusals=[DUPLICATE])
        await asyncio.gather(answer, return_exceptions=True)
        another = asyncio.create_task(client.complete("c"))
        await stack.link.next("submit")  # and nothing before it
        another.cancel()


async def test_who_submits_under_anothers_id_hears_nothing_of_its_output(stack: Stack) -> None:
    """It was detached here, so its tokens still come to this gateway."""
    async with stack.client("other") as client:
        answer = asyncio.create_task(client.complete("b", request_id="theirs"))
        submit = await stack.link.next("submit")
        await stack.link.delta(submit, 7, [40])
        await stack.link.delta(submit, 0, [40], ending=ending())
        await stack.link.send(refusals=[DUPLICATE])
        with pytest.raises(DuplicateRequest):
            await answer
        assert stack.link.received.empty()


async def test_a_tenants_streams_leave_places_for_others(stack: Stack) -> None:
    """One request is enough for any number of them, so a bound on its requests is none on its streams."""
    stack.scheduler.submitted["r"] = gateway_link_pb2.Submit(request_id="r", prompt=[1, 2], tenant="acme")
    async with stack.client("acme") as acme, stack.client("other") as other:
        streams = [asyncio.ensure_future(anext(acme.resume("r"))) for _ in range(MAX_REQUESTS)]
        for _ in range(MAX_REQUESTS - 2):
            await stack.link.next("follow")
        done, _ = await asyncio.wait(streams, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(QueueFull, match="8 streams of this gateway are yours"):
            await done.pop()
        answer = asyncio.create_task(other.complete("a"))
        await stack.link.delta(await stack.link.accept(), 0, [40], ending=ending())
        await answer
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def test_a_tenants_long_inputs_are_encoded_in_turn_and_nobody_elses_wait_for_them(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when their clients hang up: the thread goes on."""
    encoding: list[str] = []
    release = threading.Event()

    def encode(model: TextModel, prompt: str, **_: bool) -> list[int]:
        encoding.append(prompt[0])
        if prompt[0] == "s":
            release.wait(WAIT_S)
        return [1, 2]

    monkeypatch.setattr(TextModel, "encode_prompt", encode)
    monkeypatch.setattr("gateway.front.ENCODERS", 1)
    async with stack.client("acme") as acme, stack.client("other") as other:
        slow = [asyncio.create_task(acme.complete("s" * 5000)) for _ in range(3)]
        await until(lambda: _is(encoding == ["s"]))
        slow[0].cancel()
        answer = asyncio.create_task(other.complete("q" * 5000))
        assert (await stack.link.next("submit")).tenant == "other"
        assert encoding == ["s", "q"]
        release.set()
        for _ in slow[1:]:
            assert (await stack.link.next("submit")).tenant == "acme"
        for task in (*slow, answer):
            task.cancel()
        await asyncio.gather(*slow, answer, return_exceptions=True)


async def _is(fact: bool) -> bool:
    return fact


async def test_strangers_who_stay_leave_calls_for_tenants(stack: Stack) -> None:
    connections = [
        grpc.aio.insecure_channel(stack.target, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(3)
    ]
    watches = [
        health_pb2_grpc.HealthStub(connection).Watch(health_pb2.HealthCheckRequest())
        for connection in connections
        for _ in range(2 * MAX_REQUESTS)
    ]
    async with asyncio.timeout(WAIT_S):
        answers = await asyncio.gather(*(watch.read() for watch in watches), return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
    assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    async with stack.client("acme") as client:
        answer = asyncio.create_task(client.complete("a"))
        await stack.link.delta(await stack.link.accept(), 0, [40], ending=ending())
        await answer
    for connection in connections:
        await connection.close()


def test_who_is_alone_takes_four_fifths_and_gives_them_back() -> None:
    def take(who: str) -> int:
        """How many it gets, and keeps."""
        for number in range(100):
            try:
                kept.enter_context(shares.place(who))
            except QueueFull:
                return number
        return 100

    shares, kept = Shares(100, "places", 1), contextlib.ExitStack()
    assert (take("one"), take("two"), take("three")) == (80, 16, 3)
    kept.close()
    assert take("two") == 80
    kept.close()


async def test_a_refused_caller_costs_no_message(stack: Stack) -> None:
    """The call is answered before anything of the request has come."""
    async with channel(stack.target) as link:
        call = link.stream_unary("/laps_sd.v1.Inference/Generate")()
        assert await asyncio.wait_for(call.code(), WAIT_S) is grpc.StatusCode.UNAUTHENTICATED


async def test_neither_errors_nor_logs_hold_a_key_or_a_prompt(stack: Stack) -> None:
    guess = "laps_01234567_" + "guess" * 8
    with capture_logs() as logs:
        async with AsyncClient(stack.target, api_key=guess, max_retries=0) as client:
            with pytest.raises(Unauthenticated) as refused:
                await client.complete("a secret prompt")
        async with stack.client("acme") as client:
            with pytest.raises(RequestError):
                await client.complete("a secret prompt", temperature=9.0)
            answer = asyncio.create_task(client.complete("a secret prompt"))
            submit = await stack.link.accept()
            await stack.link.delta(submit, 0, [40], ending=ending())
            await answer
    said = repr(logs) + refused.value.message
    assert not any(secret in said for secret in ("guess", stack.keys["acme"], "secret"))


def test_a_key_is_not_sent_in_the_clear_to_another_machine() -> None:
    with pytest.raises(BadInput, match=r"api_key: 10\.0\.0\.1:50051 is another machine") as refused:
        AsyncClient("10.0.0.1:50051", api_key="laps_key", max_retries=0)
    assert "laps_key" not in refused.value.message


async def test_generate_takes_the_key_from_the_environment(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.gateway.test_cli import generate, output

    monkeypatch.setenv("LAPS_SD_API_KEY", stack.keys["acme"])
    process = await generate(stack.target)
    submit = await stack.link.accept()
    assert submit.tenant == "acme"
    await stack.link.delta(submit, 0, [40], ending=ending())
    code, _, err = await output(process)
    assert (code, err) == (0, "")


async def test_an_unknown_method_is_not_told_apart_without_a_key(stack: Stack) -> None:
    async with channel(stack.target) as link:
        stub = inference_pb2_grpc.InferenceStub(link)
        assert await stub.Stats(inference_pb2.StatsRequest()).code() is grpc.StatusCode.UNAUTHENTICATED
        call = link.unary_unary("/laps_sd.v1.Inference/Nonesuch")(b"")
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
