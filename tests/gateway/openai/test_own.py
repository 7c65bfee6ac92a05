"""Our own paths: why a request waits, its end, and its stream taken up again."""

import asyncio
import json
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from laps_sd.client import AsyncClient
from protos.link.v1 import common_pb2
from protos.v1 import status_pb2, types_pb2
from tests.gateway.harness import TOKENIZER, WAIT_S, ending, ids
from tests.gateway.openai.harness import CHAT, Door, door, events
from tests.gateway.openai.test_tools import ADD, ARGUMENTS, CALL, WEATHER

TEXT = "the quick brown fox jumps"


async def broken_off(at: Door) -> str:
    """Streams a detached request by HTTP, hangs up after some events, and returns the text so far. The last event's id
    is a number of tokens, and the scheduler has the whole answer."""
    body = CHAT | {"request_id": "r", "on_disconnect": "detach", "stream": True}
    tokens, text = ids(TEXT), ""
    opening = asyncio.create_task(
        at.http.send(at.http.build_request("POST", "/v1/chat/completions", json=body), stream=True)
    )
    submit = await at.link.accept()
    at.scheduler.submitted["r"] = submit
    for i, token in enumerate(tokens[:5]):
        await at.link.delta(submit, i, [token])
    answer = await asyncio.wait_for(opening, WAIT_S)
    lines, last = answer.aiter_lines(), 0
    async for line in lines:
        if line.startswith("id: "):
            last = int(line.removeprefix("id: "))
        elif line.startswith("data: "):
            text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"]["content"]
            if last == 5:
                break
    await answer.aclose()
    return text


async def go_on(at: Door) -> None:
    """The scheduler answers the follow of whoever resumes."""
    follow = await at.link.next("follow")
    tokens = ids(TEXT)
    await at.link.send(
        deltas=[
            {"request_id": "r", "start": i, "tokens": [token], **({"ending": ending()} if i == len(tokens) - 1 else {})}
            for i, token in enumerate(tokens)
            if i >= follow.offset
        ]
    )


async def test_a_stream_that_broke_goes_on_by_http_behind_the_last_event() -> None:
    async with door() as at:
        begun = await broken_off(at)
        task = asyncio.create_task(at.http.get("/v1/requests/r/stream", headers={"last-event-id": "5"}))
        await go_on(at)
        *said, last, done = events(await asyncio.wait_for(task, WAIT_S))
        assert begun + "".join(each["choices"][0]["delta"].get("content", "") for each in said) == TEXT
        assert (done, last["usage"]["completion_tokens"]) == ("[DONE]", len(ids(TEXT)))


async def test_a_stream_that_was_taken_up_can_be_taken_up_once_more() -> None:
    async with door() as at:
        await broken_off(at)
        task = asyncio.create_task(at.http.get("/v1/requests/r/stream?offset=3"))
        await go_on(at)
        text = (await asyncio.wait_for(task, WAIT_S)).text
        ids_said = [int(line.removeprefix("id: ")) for line in text.splitlines() if line.startswith("id: ")]
        assert ids_said[0] > 3
        assert ids_said[-1] == len(ids(TEXT))


async def test_a_stream_that_broke_goes_on_by_grpc() -> None:
    async with door() as at, AsyncClient(at.gateway.grpc) as client:
        begun = await broken_off(at)

        async def rest() -> str:
            return "".join([chunk.text async for chunk in client.resume("r", offset=5)])

        task = asyncio.create_task(rest())
        await go_on(at)
        assert begun + await asyncio.wait_for(task, WAIT_S) == TEXT


async def test_a_stream_can_be_taken_up_as_a_completion_from_any_token() -> None:
    async with door() as at:
        await broken_off(at)
        task = asyncio.create_task(at.http.get("/v1/requests/r/stream?offset=3&as=completion"))
        await go_on(at)
        *said, last, _ = events(await asyncio.wait_for(task, WAIT_S))
        assert last["metrics"]["tokens_per_second"] is None  # the clock began with this stream
        assert "".join(each["choices"][0]["text"] for each in said) == TEXT.removeprefix(
            str(TOKENIZER.decode(ids(TEXT)[:3]))
        )


def told(said: list[Any]) -> tuple[str, list[str], str, str | None]:
    """The words of a stream's events, the functions that they name, the arguments, and the finish reason."""
    choices = [choice for each in said if each != "[DONE]" for choice in each["choices"]]
    words = "".join(choice["delta"].get("content") or "" for choice in choices)
    calls = [call["function"] for choice in choices for call in choice["delta"].get("tool_calls", [])]
    names = [call["name"] for call in calls if "name" in call]
    return words, names, "".join(call["arguments"] for call in calls), choices[-1]["finish_reason"]


@pytest.mark.parametrize("before", ["", "call>", "Rome"])
@pytest.mark.parametrize(("tool_choice", "words"), [("auto", "the fox "), ("required", "")])
async def test_a_call_goes_on_as_a_call_from_any_token(before: str, tool_choice: str, words: str) -> None:
    """The client has nothing, a part of the mark, or the function's name and some of the arguments."""
    text = words + CALL
    fields = {"tools": [WEATHER, ADD], "tool_choice": tool_choice, "on_disconnect": "detach", "stream": True}
    async with door(context_tokens=2048) as at:
        answer, at.scheduler.submitted["r"] = await at.answered(CHAT | fields | {"request_id": "r"}, text)
        whole = events(answer)
        offset = len(ids(text[: text.index(before)]))
        places = [int(line.removeprefix("id: ")) for line in answer.text.splitlines() if line.startswith("id: ")]
        had = [each for each, place in zip(whole, places, strict=False) if place <= offset]
        task = asyncio.create_task(at.http.get(f"/v1/requests/r/stream?offset={offset}"))
        await at.link.next("follow")
        await at.say(at.scheduler.submitted["r"], text)
        rest = events(await asyncio.wait_for(task, WAIT_S))
        assert told([*had, *rest]) == told(whole) == (words, ["weather"], ARGUMENTS, "tool_calls")


async def test_events_have_ids_only_where_the_request_runs_on() -> None:
    async with door() as at:
        answer, _ = await at.answered(CHAT | {"stream": True}, "jumps")
        assert "id: " not in answer.text
        answer, _ = await at.answered(CHAT | {"stream": True, "on_disconnect": "detach"}, "jumps")
        assert answer.text.count("id: ") == len(events(answer)) - 1


async def test_why_a_request_waits() -> None:
    async with door() as at:
        at.scheduler.known["r"] = status_pb2.RequestStatus(
            request_id="r",
            state=status_pb2.REQUEST_STATE_WAITING,
            position=3,
            queue_level=1,
            submit_time=Timestamp(seconds=1),
        )
        said = (await at.http.get("/v1/requests/r")).json()
        assert (said["state"], said["position"], said["queue_level"]) == ("waiting", 3, 1)
        assert said["why"].startswith("it has not run yet: 3 requests are served before it")
        assert (said["submit_time"], said["estimated_start_time"]) == ("1970-01-01T00:00:01Z", None)


async def test_a_request_that_lost_its_worker_is_not_said_to_wait_for_its_first_round() -> None:
    async with door() as at:
        at.scheduler.known["r"] = status_pb2.RequestStatus(
            request_id="r",
            state=status_pb2.REQUEST_STATE_WAITING,
            wait_reason=status_pb2.WAIT_REASON_NO_WORKER,
            output_tokens=53,
        )
        why = (await at.http.get("/v1/requests/r")).json()["why"]
        assert why == "it waits to go on: 0 requests are served before it, and no worker is attached"


async def test_an_end_is_told_only_where_there_was_something_to_end() -> None:
    async with door() as at:
        for state, live in ((status_pb2.REQUEST_STATE_RUNNING, True), (status_pb2.REQUEST_STATE_FINISHED, False)):
            at.scheduler.known["r"] = status_pb2.RequestStatus(request_id="r", state=state)
            answer = await at.http.delete("/v1/requests/r")
            assert (answer.status_code, answer.json()["cancelled"]) == (200, live)
        assert (await at.link.next("cancel")).request_id == "r"
        assert at.link.received.empty()


async def test_a_request_is_found_by_its_id_and_by_that_of_its_answer() -> None:
    async with door() as at:
        for id in ("r", "cmpl-own"):
            at.scheduler.known[id] = status_pb2.RequestStatus(request_id=id)
        for asked, found in (
            ("chatcmpl-r", "r"),
            ("resp_r", "r"),
            ("cmpl-own", "cmpl-own"),
            ("cmpl-cmpl-own", "cmpl-own"),
        ):
            assert (await at.http.get(f"/v1/requests/{asked}")).json()["id"] == found


async def test_a_wrong_method_is_told_all_that_are_right() -> None:
    async with door() as at:
        answer = await at.http.post("/v1/requests/r")
        assert (answer.status_code, set(answer.headers["allow"].split(", "))) == (405, {"DELETE", "GET", "HEAD"})


async def test_an_unknown_request_is_404_whatever_is_asked_of_it() -> None:
    async with door() as at:
        for verb, path in (("GET", ""), ("DELETE", ""), ("GET", "/stream")):
            answer = await at.http.request(verb, f"/v1/requests/nobody{path}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")


async def test_a_bad_offset_is_named() -> None:
    async with door() as at:
        answer = await at.http.get("/v1/requests/r/stream?offset=-1")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "offset")
        answer = await at.http.get("/v1/requests/r/stream", headers={"last-event-id": "x"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "last-event-id")


@pytest.mark.parametrize(("header", "fields"), [("k-1", {}), ('"k-1"', {}), ("other", {"request_id": "k-1"})])
async def test_an_idempotency_key_is_the_requests_id_unless_the_body_has_one(
    header: str, fields: dict[str, str]
) -> None:
    async with door() as at:
        answer, submit = await at.answered(CHAT | fields, headers={"Idempotency-Key": header})
        assert (answer.json()["id"], submit.request_id) == ("chatcmpl-k-1", "k-1")


@pytest.mark.parametrize(("asked", "detached"), [({}, True), ({"on_disconnect": "cancel"}, False)])
async def test_whoever_sends_the_same_key_after_a_broken_connection_finds_the_answer(
    asked: dict[str, str], detached: bool
) -> None:
    async with door() as at:
        _, submit = await at.answered(CHAT | asked, headers={"Idempotency-Key": "k-1"})
        assert (submit.on_disconnect == types_pb2.ON_DISCONNECT_DETACH) is detached


@pytest.mark.parametrize("key", ["", '""'])
async def test_an_empty_key_is_none(key: str) -> None:
    async with door() as at:
        body = {"model": "tiny", "input": "the fox"}
        answer, submit = await at.answered(body, path="/v1/responses", headers={"Idempotency-Key": key})
        assert answer.status_code == 200
        assert submit.on_disconnect == types_pb2.ON_DISCONNECT_CANCEL


async def test_an_idempotency_key_that_is_no_id_is_refused() -> None:
    async with door() as at:
        answer = await at.http.post("/v1/chat/completions", json=CHAT, headers={"Idempotency-Key": "a b"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"model": "tiny", "input": "the fox"}),
        ("/v1/embeddings", {"model": "tiny", "input": "the fox"}),
    ],
)
async def test_the_id_that_proxies_give_a_call_names_no_request(path: str, body: dict[str, Any]) -> None:
    async with door() as at:
        seen, embedding = set[str](), common_pb2.Logprobs(embedding=[0.5])
        for _ in range(2):
            task = at.asked(body, path, headers={"X-Request-Id": "corr-1"})
            submit = await at.link.accept()
            seen.add(submit.request_id)
            with capture_logs(processors=[merge_contextvars]) as logs:
                await at.link.delta(submit, 0, [1], logprobs=embedding, ending=ending())
                assert (await task).headers["x-request-id"] == "corr-1"
                assert [entry["x_request_id"] for entry in logs if entry["event"] == "ended"] == ["corr-1"]
        assert len(seen - {"corr-1"}) == 2


@pytest.mark.parametrize(
    ("header", "fields", "priority"),
    [
        ("bulk", {}, types_pb2.PRIORITY_BATCH),
        ("Interactive", {}, types_pb2.PRIORITY_INTERACTIVE),
        ("system", {}, types_pb2.PRIORITY_INTERACTIVE),
        ("default", {}, types_pb2.PRIORITY_DEFAULT),
        ("unheard of", {}, types_pb2.PRIORITY_DEFAULT),
        ("bulk", {"class": "interactive"}, types_pb2.PRIORITY_INTERACTIVE),
        ("bulk", {"class": "default"}, types_pb2.PRIORITY_DEFAULT),
    ],
)
async def test_a_gateway_before_ours_may_say_the_class(header: str, fields: dict[str, str], priority: int) -> None:
    async with door() as at:
        answer, submit = await at.answered(CHAT | fields, headers={"X-SMG-Priority": header})
        assert (answer.status_code, submit.priority) == (200, priority)
