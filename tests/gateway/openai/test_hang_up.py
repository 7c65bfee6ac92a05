"""A client that hangs up cancels its request, however it asked; unless it said that the request is to run on."""

import asyncio
import json
from contextlib import AsyncExitStack, suppress

import pytest

from gateway.openai import sse
from protos.v1 import types_pb2
from tests.gateway.harness import WAIT_S, ending, ids
from tests.gateway.openai.harness import CHAT, COMPLETION, door, events


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("body", [CHAT, COMPLETION])
async def test_before_the_first_token(stream: bool, body: dict[str, object]) -> None:
    async with door() as at:
        task = at.asked(body | {"stream": stream})
        submit = await at.link.accept()
        task.cancel()
        assert (await at.link.next("cancel")).request_id == submit.request_id


@pytest.mark.parametrize("stream", [True, False])
async def test_in_mid_answer(stream: bool) -> None:
    async with door() as at:
        task = at.asked(CHAT | {"stream": stream})
        submit = await at.link.accept()
        await at.link.delta(submit, 0, ids("jumps"))
        task.cancel()
        assert (await at.link.next("cancel")).request_id == submit.request_id


async def test_before_the_request_is_durable() -> None:
    async with door() as at:
        task = at.asked(CHAT)
        submit = await at.link.next("submit")
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await at.link.send(accepted=[submit.request_id])  # until then there is nothing to cancel
        assert (await at.link.next("cancel")).request_id == submit.request_id


async def test_before_the_body_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    async with door() as at:
        host, _, port = at.gateway.http.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        await at.answered(CHAT)
        assert "unexpected" not in capsys.readouterr().out  # nothing to log: it is no error of ours


@pytest.mark.parametrize("early", [b"\r\n", b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"])
@pytest.mark.parametrize("apart", [True, False])
async def test_after_bytes_that_came_too_early(early: bytes, apart: bool) -> None:
    """Behind the body an old client sends the end of a line, and a hasty one its next request."""
    body = json.dumps(CHAT).encode()
    async with door() as at:
        host, _, port = at.gateway.http.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        asked = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        writer.write(asked if apart else asked + early)
        submit = await at.link.accept()
        if apart:
            writer.write(early)
            await writer.drain()
            await at.http.get("/live")  # by now it was read
        writer.close()
        assert (await at.link.next("cancel")).request_id == submit.request_id


@pytest.mark.parametrize("head", [b"HTTP/1.0\r\n", b"HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"])
async def test_of_a_connection_for_one_request_what_comes_behind_it_is_left(head: bytes) -> None:
    body = json.dumps(CHAT).encode()
    async with door() as at:
        host, _, port = at.gateway.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions %bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        submit = await at.link.accept()
        writer.write(b"\r\n")
        await writer.drain()
        await at.http.get("/live")  # by now it was read
        await at.say(submit, "jumps")
        answer = await asyncio.wait_for(reader.read(), WAIT_S)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"jumps" in answer
        writer.close()


async def test_every_choice_is_cancelled() -> None:
    async with door() as at:
        task = at.asked(CHAT | {"n": 3, "stream": True})
        submits = [await at.link.accept() for _ in range(3)]
        await at.link.delta(submits[1], 0, ids("jumps"))
        task.cancel()
        cancelled = {(await at.link.next("cancel")).request_id for _ in range(3)}
        assert cancelled == {each.request_id for each in submits}


async def test_a_detached_request_runs_on() -> None:
    async with door() as at:
        task = at.asked(CHAT | {"on_disconnect": "detach"})
        submit = await at.link.accept()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        # What the gateway says next is the next request's submission: no cancel came before it.
        _, other = await at.answered(CHAT)
        assert other.request_id != submit.request_id
        assert submit.on_disconnect == types_pb2.ON_DISCONNECT_DETACH


async def test_one_failed_choice_ends_the_others() -> None:
    async with door() as at:
        task = at.asked(CHAT | {"n": 2})
        one, other = [await at.link.accept() for _ in range(2)]
        await at.link.delta(one, 0, ending=ending(types_pb2.FINISH_REASON_ERROR, message="it broke"))
        answer = await asyncio.wait_for(task, WAIT_S)
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "it broke")
        assert (await at.link.next("cancel")).request_id == other.request_id


async def test_a_quiet_stream_is_kept_alive_and_then_errors_are_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.02)
    async with door() as at, AsyncExitStack() as stack:
        stream = at.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True})
        opening = asyncio.create_task(stack.enter_async_context(stream))
        submit = await at.link.accept()
        answer = await opening
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        assert await anext(lines) == ": keep-alive"
        await at.link.delta(submit, 0, ending=ending(types_pb2.FINISH_REASON_DEADLINE))
        rest = [line async for line in lines if line.startswith("data: ")]
        assert len(rest) == 1
        assert '"code":"deadline_exceeded"' in rest[0]


async def test_no_comment_comes_before_the_request_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)
    async with door() as at:
        task = at.asked(CHAT | {"stream": True})
        submit = await at.link.next("submit")
        refusal = {"request_id": submit.request_id, "code": 8, "message": "full", "retry_after_s": 0.7}
        await at.link.send(refusals=[refusal])
        answer = await asyncio.wait_for(task, WAIT_S)
        assert (answer.status_code, answer.headers["retry-after-ms"], answer.headers["retry-after"]) == (
            429,
            "700",
            "1",
        )


async def test_a_stream_outlives_its_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.001)
    async with door() as at:
        answer, _ = await at.answered(CHAT | {"stream": True}, "the quick brown fox")
        deltas = [each["choices"][0]["delta"] for each in events(answer)[:-1]]
        assert "".join(delta.get("content", "") for delta in deltas) == "the quick brown fox"
