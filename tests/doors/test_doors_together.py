"""A request that came in by one door goes on through another, on the real model; a client that hangs up is noticed at
once."""

import json
import uuid
from typing import Any

import httpx2
import pytest

from laps_sd.client import AsyncClient
from tests.doors.conftest import MODEL
from tests.e2e.stack import Stack
from tests.waiting import WAIT_S, until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.model]
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    "temperature": 0,
    "max_tokens": 60,
    "stream": True,
    "on_disconnect": "detach",
}
ENOUGH = 5  # events before the client hangs up


def text_of(line: str) -> str:
    choices = json.loads(line.removeprefix("data: "))["choices"] if line.startswith("data: {") else []
    return "".join(choice["delta"].get("content", "") for choice in choices)


async def begun(http: httpx2.AsyncClient, request_id: str) -> tuple[str, int]:
    """The text of some events, and the id of the last one."""
    text, last, events = "", 0, 0
    async with http.stream("POST", "/v1/chat/completions", json=ASK | {"request_id": request_id}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                last = int(line.removeprefix("id: "))
            elif line.startswith("data: "):
                text, events = text + text_of(line), events + 1
                if events == ENOUGH:
                    break
    return text, last


async def test_a_stream_that_broke_goes_on_through_either_door(stack: Stack) -> None:
    base = f"http://{stack.http}"
    async with httpx2.AsyncClient(base_url=base, timeout=WAIT_S) as http, AsyncClient(stack.grpc) as client:
        whole = (await http.post("/v1/chat/completions", json=ASK | {"stream": False})).json()
        text = whole["choices"][0]["message"]["content"]
        request_id = uuid.uuid4().hex
        first, last = await begun(http, request_id)
        assert text.startswith(first)
        assert 0 < last < whole["usage"]["completion_tokens"]
        by_grpc = "".join([chunk.text async for chunk in client.resume(request_id, offset=last)])
        path = f"/v1/requests/{request_id}/stream"
        by_http = (await http.get(path, headers={"last-event-id": str(last)})).text
        assert first + by_grpc == text
        assert first + "".join(map(text_of, by_http.splitlines())) == text


async def test_a_client_that_hangs_up_ends_its_request(stack: Stack) -> None:
    body = ASK | {"on_disconnect": "cancel", "max_tokens": 4000, "ignore_eos": True}
    async with httpx2.AsyncClient(base_url=f"http://{stack.http}", timeout=WAIT_S) as http:
        request_id = uuid.uuid4().hex
        await begun_and_left(http, body | {"request_id": request_id})

        async def ended() -> bool:
            state = (await http.get(f"/v1/requests/{request_id}")).json()
            return bool(state["finish_reason"] == "cancelled")

        await until(ended)


async def begun_and_left(http: httpx2.AsyncClient, body: dict[str, Any]) -> None:
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                return
