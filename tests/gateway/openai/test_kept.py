"""Items of earlier answers that a client of the Responses API names instead of sending them (Vercel's `ai` does so by
default): they are read back from the scheduler, or it is said which one is gone."""

import asyncio
from typing import Any

import pytest

from gateway.openai import kept, tools
from gateway.validate import MAX_MESSAGES
from protos.v1 import status_pb2
from tests.gateway.harness import WAIT_S, ending, ids
from tests.gateway.openai import test_tools as chats
from tests.gateway.openai.harness import Door, door
from tests.gateway.openai.test_response_calls import ASK, RESULT, USER

PATH = "/v1/responses"


async def first_answer(at: Door, text: str, **fields: Any) -> list[dict[str, Any]]:
    """The items of an answer with this text, which the scheduler goes on to know."""
    task = at.asked(ASK | {"request_id": "r", **fields}, PATH)
    submit = await at.link.accept()
    at.scheduler.submitted["r"] = submit
    await at.say(submit, text)
    state = status_pb2.REQUEST_STATE_FINISHED
    at.scheduler.known["r"] = status_pb2.RequestStatus(request_id="r", state=state)
    output: list[dict[str, Any]] = (await asyncio.wait_for(task, WAIT_S)).json()["output"]
    return output


async def prompt_of(at: Door, input: list[Any], *read: str) -> list[int]:
    """The tokens that the model gets for the input, after the scheduler was asked for these answers."""
    task = at.asked(ASK | {"input": input}, PATH)
    for text in read:
        await at.link.next("follow")
        await at.link.send(deltas=[{"request_id": "r", "start": 0, "tokens": ids(text), "ending": ending()}])
    submit = await at.link.accept()
    await at.say(submit, "a")
    assert (await asyncio.wait_for(task, WAIT_S)).status_code == 200
    return list(submit.prompt)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "jumps"),
        ({}, f"I look. {chats.CALL}"),
        ({"tools": []}, f"A call is written {chats.CALL}, like this."),
        ({"tool_choice": {"type": "function", "name": "weather"}}, chats.ARGUMENTS),
    ],
)
async def test_a_named_item_is_as_good_as_the_item(fields: dict[str, Any], text: str) -> None:
    async with door(context_tokens=2048) as at:
        output = await first_answer(at, text, **fields)
        result = [RESULT | {"call_id": output[-1]["call_id"]}] if "call_id" in output[-1] else []
        named: list[Any] = [{"type": "item_reference", "id": item["id"]} for item in output]
        assert await prompt_of(at, [USER, *named, *result], text) == await prompt_of(at, [USER, *output, *result])
        named = [{"id": item["id"]} for item in output]
        assert await prompt_of(at, [USER, *named, *result], text) == await prompt_of(at, [USER, *output, *result])


@pytest.mark.parametrize("id", ["msg_nobody", "fc_weather", "fc_.r", "msg_a b", "rs_r", "", "\n"])
async def test_an_item_that_is_not_there_is_named(id: str) -> None:
    async with door() as at:
        error = await at.refused(ASK | {"input": [USER, {"type": "item_reference", "id": id}]}, PATH)
        assert (error["status"], error["param"], error["code"]) == (400, "input[1].id", "invalid_value")
        assert error["message"].endswith("send the item itself")


async def test_an_answer_that_still_runs_is_not_waited_for() -> None:
    async with door() as at:
        at.scheduler.known["r"] = status_pb2.RequestStatus(request_id="r", state=status_pb2.REQUEST_STATE_RUNNING)
        error = await at.refused(ASK | {"input": [{"type": "item_reference", "id": "msg_r"}]}, PATH)
        assert error["message"] == "input[0].id: the answer that it belongs to has not ended"


async def test_what_is_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST", 0)
    async with door() as at:
        error = await at.refused(ASK | {"input": [{"type": "item_reference", "id": "msg_r"}]}, PATH)
        assert (error["status"], error["param"]) == (400, "input")


async def test_so_many_names_are_refused_before_any_is_read() -> None:
    names = [{"id": "msg_nobody"}] * (MAX_MESSAGES + 1)
    async with door() as at:
        error = await at.refused(ASK | {"input": names}, PATH)
        assert error["message"] == f"input: names {len(names)} items; at most {MAX_MESSAGES}"


async def refused_once_read(at: Door, input: list[Any], text: str) -> dict[str, Any]:
    """The error of a body whose items are of the first answer, which has this text."""
    task = at.asked(ASK | {"input": input}, PATH)
    await at.link.next("follow")
    await at.link.send(deltas=[{"request_id": "r", "start": 0, "tokens": ids(text), "ending": ending()}])
    error: dict[str, Any] = (await asyncio.wait_for(task, WAIT_S)).json()["error"]
    return error


async def test_an_answer_named_again_and_again_counts_each_time() -> None:
    text = "jumps " * 40
    async with door(context_tokens=2048, max_input_bytes=1000) as at:
        await first_answer(at, text)
        # The last item would be told as gone if it were looked for.
        error = await refused_once_read(at, [*[{"id": "msg_r"}] * 5, {"id": "msg_a b"}], text)
        assert error["message"] == "input: the items that it names have more than 1000 bytes"


async def test_an_answer_is_taken_apart_once_however_often_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    taken_apart: list[str] = []
    monkeypatch.setattr(kept, "said", lambda text, form: taken_apart.append(text) or tools.said(text, form))
    async with door(context_tokens=2048) as at:
        await first_answer(at, "jumps")
        await refused_once_read(at, [*[{"id": "msg_r"}] * 5, {"id": "msg_a b"}], "jumps")
        assert taken_apart == ["jumps"]


async def test_a_scheduler_that_says_nothing_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "READ_S", 0.05)
    async with door() as at:
        at.scheduler.known["r"] = status_pb2.RequestStatus(request_id="r", state=status_pb2.REQUEST_STATE_FINISHED)
        at.scheduler.silent = asyncio.Event()
        error = await at.refused(ASK | {"input": [{"type": "item_reference", "id": "msg_r"}]}, PATH)
        assert (error["status"], error["code"]) == (503, "server_is_overloaded")
        at.scheduler.silent.set()
