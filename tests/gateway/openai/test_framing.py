"""How a stream's events lie in the bytes of HTTP, which the gateway frames itself. Read from a socket: a library of
clients would hide it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace

import pytest
from starlette.types import Message

from gateway.chunk import Chunk
from gateway.openai import sse
from protos.http_server import BODY, Body
from protos.link.v1 import gateway_link_pb2 as pb
from protos.v1 import status_pb2, types_pb2
from tests.gateway.harness import WAIT_S, ending, ids
from tests.gateway.openai.harness import CHAT, Door, door
from tests.waiting import until

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
TEXT = "the quick brown fox jumps"


@asynccontextmanager
async def connection(at: Door) -> AsyncIterator[Streams]:
    host, _, port = at.gateway.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    yield reader, writer
    writer.close()


def post(body: Mapping[str, object], version: str = "1.1") -> bytes:
    said = json.dumps({**body, "stream": True}).encode()
    return b"POST /v1/chat/completions HTTP/%s\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (
        version.encode(),
        len(said),
        said,
    )


async def head(reader: asyncio.StreamReader) -> bytes:
    return (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)).lower()


async def dechunked(reader: asyncio.StreamReader) -> bytes:
    """The body, of well-formed chunks up to the last one."""
    whole = b""
    while size := int(await asyncio.wait_for(reader.readline(), WAIT_S), 16):
        whole += await asyncio.wait_for(reader.readexactly(size), WAIT_S)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readline() == b"\r\n"
    return whole


def text(body: bytes) -> str:
    said = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: {")]
    choices = [choice for each in said for choice in json.loads(each)["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize("version", ["1.1", "1.2"])
async def test_events_are_whole_chunks_and_the_connection_serves_the_next_request(version: str) -> None:
    async with door() as at, connection(at) as (reader, writer):
        for _ in range(2):
            writer.write(post(CHAT, version))
            await at.say(await at.link.accept(), TEXT)
            assert b"transfer-encoding: chunked" in await head(reader)
            assert text(await dechunked(reader)) == TEXT


async def test_a_client_of_http_1_0_gets_bare_events_until_the_connection_ends() -> None:
    async with door() as at, connection(at) as (reader, writer):
        writer.write(post(CHAT, "1.0"))
        await at.say(await at.link.accept(), TEXT)
        assert b"transfer-encoding" not in await head(reader)
        body = await asyncio.wait_for(reader.read(), WAIT_S)
        assert body.startswith(b"data: ")
        assert body.endswith(sse.DONE)
        assert text(body) == TEXT


async def test_an_error_behind_the_first_events_is_an_event_and_the_body_ends_in_order() -> None:
    async with door() as at, connection(at) as (reader, writer):
        writer.write(post(CHAT))
        submit = await at.link.accept()
        for i, token in enumerate(ids("jumps")):
            await at.link.delta(submit, i, [token])
        end = ending(types_pb2.FINISH_REASON_ERROR, message="it broke")
        await at.link.delta(submit, len(ids("jumps")), ending=end)
        await head(reader)
        *_, last = [line for line in (await dechunked(reader)).split(b"\n") if line]
        assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "it broke"


async def test_head_of_a_stream_opens_none_and_is_answered_without_a_body() -> None:
    """A body there would be read as the answer to the connection's next request."""
    async with door() as at, connection(at) as (reader, writer):
        at.scheduler.known["r"] = status_pb2.RequestStatus(request_id="r", state=status_pb2.REQUEST_STATE_RUNNING)
        at.scheduler.submitted["r"] = pb.Submit(request_id="r")  # it ends with its client
        for id, status in (("r", b"200"), ("chatcmpl-r", b"200"), ("nobody", b"404")):
            writer.write(b"HEAD /v1/requests/%b/stream HTTP/1.1\r\nhost: x\r\n\r\n" % id.encode())
            answer = await head(reader)
            assert answer.startswith(b"http/1.1 " + status)
            assert (b"text/event-stream" in answer) is (status == b"200")
            assert b"content-length: 0" not in answer
        assert at.link.received.empty()
        writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await head(reader)).startswith(b"http/1.1 200")


async def test_the_head_and_the_first_event_are_one_piece() -> None:
    """Each piece would wake the client."""
    pieces: list[bytes] = []
    transport = SimpleNamespace(write=pieces.append, is_closing=lambda: False)
    flow, scope = SimpleNamespace(write_paused=False), {"http_version": "1.1"}
    cycle = SimpleNamespace(transport=transport, flow=flow, scope=scope)

    async def send(message: Message) -> None:
        cycle.transport.write(b"head." if message["type"] == "http.response.start" else message["body"])

    events = sse.Events({"extensions": {BODY: Body(cycle)}}, send, {})
    await events.write(b"one.")
    await events.write(b"two.")
    await events.write(b"", more=False)
    assert pieces == [b"head.one.", b"two.", b""]
    pieces.clear()
    await sse.Events({"extensions": {BODY: Body(cycle)}}, send, {}).write(b"all", more=False)
    assert pieces == [b"head.", b"all"]


@pytest.mark.parametrize(("on_disconnect", "comment"), [("cancel", ": keep-alive\n\n"), ("detach", ": keep-alive\n")])
async def test_a_comment_is_a_block_of_its_own_only_where_events_have_no_ids(
    monkeypatch: pytest.MonkeyPatch, on_disconnect: str, comment: str
) -> None:
    commented, write = asyncio.Event(), sse.Events.write

    async def told(self: sse.Events, events: bytes, *, more: bool = True) -> None:
        await write(self, events, more=more)
        if events.startswith(b":"):
            commented.set()

    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)
    monkeypatch.setattr(sse.Events, "write", told)
    async with door() as at:
        task = at.asked(CHAT | {"stream": True, "on_disconnect": on_disconnect})
        submit = await at.link.accept()
        await asyncio.wait_for(commented.wait(), WAIT_S)
        await at.say(submit, "a")
        said, _, _ = (await asyncio.wait_for(task, WAIT_S)).text.partition("data: ")
        comments = said.removesuffix("id: 1\n")
        assert comments == comment * comments.count(":") != ""


async def test_chunks_that_say_nothing_do_not_keep_back_the_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.05)
    said: list[bytes] = []

    async def send(message: Message) -> None:
        said.append(message.get("body", b""))

    class Silent:
        def write_at_once(self, ready: Callable[[], bool], write: Callable[[Chunk], None]) -> None:
            self.ready, self.write = ready, write

        async def __aiter__(self) -> AsyncIterator[Chunk]:
            async def commented() -> bool:
                assert self.ready()
                self.write(Chunk())
                return said[-1].startswith(b":")

            await until(commented)
            for _ in ():
                yield Chunk()

    events = sse.Events({"extensions": {BODY: SimpleNamespace(waits=False, in_one_piece=nullcontext)}}, send, {})
    with events.kept_alive():
        await events.write(b"data: 1\n\n")
        await events.relay(Silent(), lambda chunk: b"")  # type: ignore[arg-type]
