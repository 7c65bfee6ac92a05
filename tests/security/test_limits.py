"""What a stranger may cost the gateway: sizes, streams and pings are bounded before anything is parsed."""

import asyncio
import struct
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from gateway.text import TextModel
from laps_sd.client import AsyncClient
from protos.errors import BadInput, Failed
from protos.serving import MAX_METADATA_BYTES, channel
from tests.gateway.harness import WAIT_S, stack

GENERATE = "/laps_sd.v1.Inference/Generate"
STATS = "/laps_sd.v1.Inference/Stats"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS, _PING, _GOAWAY = 4, 6, 7
_MAX_CONCURRENT_STREAMS, _ENHANCE_YOUR_CALM = 3, 11


@pytest.fixture
async def client() -> AsyncIterator[AsyncClient]:
    async with stack(max_input_bytes=4096, max_requests=3) as (_, _, client):
        yield client


async def answer(client: AsyncClient, method: str, payload: bytes, **call: object) -> tuple[grpc.StatusCode, str]:
    sending = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(client.target, options=sending) as link:
        made = link.unary_unary(method)(payload, timeout=WAIT_S, **call)
        return await made.code(), await made.details()


async def test_a_message_beyond_the_prompts_limit_is_never_read(client: AsyncClient) -> None:
    code, details = await answer(client, GENERATE, bytes(4096 + (64 << 10) + 1))
    assert (code, "larger than max" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)


async def test_a_small_message_that_unpacks_to_a_big_one_is_refused(client: AsyncClient) -> None:
    code, details = await answer(client, GENERATE, bytes(50 << 20), compression=grpc.Compression.Gzip)
    assert (code, "larger than max" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)


async def test_metadata_is_bounded(client: AsyncClient) -> None:
    code, details = await answer(client, STATS, b"", metadata=(("x", "y" * (MAX_METADATA_BYTES + 1)),))
    assert (code, "metadata" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)


@pytest.mark.parametrize("method", [GENERATE, STATS])
async def test_bytes_that_are_no_message_are_bad_input(client: AsyncClient, method: str) -> None:
    assert await answer(client, method, b"\xff\xff\xff") == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "request: not a message of the interface",
    )


@pytest.mark.parametrize("method", [GENERATE, STATS])
async def test_a_call_that_ends_without_a_message_is_bad_input(client: AsyncClient, method: str) -> None:
    async with grpc.aio.insecure_channel(client.target) as channel:
        call = channel.stream_stream(method)()
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert (refused.value.code(), refused.value.details()) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "request: the call ended without a message",
        )


async def test_a_chats_messages_are_bounded(client: AsyncClient) -> None:
    with pytest.raises(BadInput, match=r"^chat: 1025 messages; at most 1024"):
        await client.complete(messages=[{}] * 1025)


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, bytes]]:
    """Type and payload of what the server says on a raw HTTP/2 connection."""
    while True:
        header = await asyncio.wait_for(reader.readexactly(9), WAIT_S)
        yield header[3], await reader.readexactly(int.from_bytes(header[:3], "big"))


def frame(kind: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + payload


async def connect(client: AsyncClient) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = client.target.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(_PREFACE + frame(_SETTINGS))
    return reader, writer


async def test_streams_of_one_connection_are_bounded(client: AsyncClient) -> None:
    reader, writer = await connect(client)
    settings = await anext(payload async for kind, payload in frames(reader) if kind == _SETTINGS)
    values = dict(struct.iter_unpack(">HI", settings))
    writer.close()
    assert values[_MAX_CONCURRENT_STREAMS] == 6


async def test_who_pings_without_end_is_sent_away(client: AsyncClient) -> None:
    reader, writer = await connect(client)
    writer.write(frame(_PING, bytes(8)) * 10)
    goaway = await anext(payload async for kind, payload in frames(reader) if kind == _GOAWAY)
    writer.close()
    assert int.from_bytes(goaway[4:8], "big") == _ENHANCE_YOUR_CALM


@pytest.mark.parametrize("reflection", [True, False])
async def test_reflection_can_be_switched_off(reflection: bool) -> None:
    async with stack(reflection=reflection) as (_, _, client), channel(client.target) as link:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(link).ServerReflectionInfo(iter([request]), timeout=WAIT_S)
        code = grpc.StatusCode.OK if reflection else grpc.StatusCode.UNIMPLEMENTED
        with_answer = [part async for part in call] if reflection else []
        assert await call.code() is code
        assert len(with_answer) == reflection


async def test_what_breaks_is_logged_without_the_clients_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: TextModel, prompt: str, **_: bool) -> list[int]:
        raise RuntimeError(f"cannot encode {prompt!r}")

    monkeypatch.setattr(TextModel, "encode_prompt", broken)
    async with stack() as (_, _, client):
        with capture_logs() as logs, pytest.raises(Failed, match="internal error"):
            await client.complete("a secret")
    (entry,) = [entry for entry in logs if entry["event"] == "unexpected"]
    assert entry["trace"][0] == "RuntimeError"
    assert "broken" in entry["trace"][-1]
    assert "secret" not in repr(logs)
