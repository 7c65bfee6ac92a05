"""Other people's servers, by OpenAI's interface: what they are asked, and what counts as an output."""

import asyncio
import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import httpx2
import pytest

from laps_sd.loadtest.openai import OpenAI
from laps_sd.loadtest.plan import Planned, Words
from laps_sd.loadtest.record import Record
from laps_sd.loadtest.target import Refused, Server
from tests.loadtest.sse import DONE, Answers, delta, serving, text, usage
from tests.waiting import WAIT_S

PLANNED = Planned(0, 0.0, "Why?", 10, max_tokens=7, ignore_eos=True)


async def ask(answers: Answers, planned: Planned = PLANNED, times: int = 1, **server: Any) -> Record:
    """The last of `times` answers; the clock counts its readings."""
    async with serving(answers) as url, OpenAI(Server(at=url, model="tiny", timeout_s=WAIT_S, **server)) as target:
        for _ in range(times):
            record = Record(0, 0.0, 0.0)
            await target.answer(target.prepare(planned), record, partial(next, itertools.count(1.0)))
        return record


async def test_a_chat_is_streamed_and_its_tokens_are_those_of_the_usage() -> None:
    events = [delta(role="assistant", content=""), delta(content="Be"), delta(content="cause", finish="stop")]
    answers = Answers([*events, usage(12, 5), DONE])
    record = await ask(answers, api_key="secret")
    ((path, headers, body),) = answers.asked
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer secret"
    assert body["messages"] == [{"role": "user", "content": "Why?"}]
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ("tiny", 7, True, True)
    assert record.outputs == [(1.0, 2), (2.0, 3)]
    assert (record.input_tokens, record.output_tokens, record.finish_reason) == (12, 5, "stop")


async def test_thinking_is_output() -> None:
    record = await ask(Answers([delta(reasoning_content="Hm"), delta(content="Yes", finish="stop"), usage(1, 2), DONE]))
    assert len(record.outputs) == 2


@pytest.mark.parametrize("raw", [True, False])
async def test_a_prompt_without_a_chat_template_is_completed(raw: bool) -> None:
    answers = Answers([text("a"), text("b", "length"), usage(3, 2), DONE])
    planned = PLANNED if raw else replace(PLANNED, prompt="", prompt_tokens=3)
    await ask(answers, planned, chat=not raw)
    ((path, _, body),) = answers.asked
    assert path == "/v1/completions"
    assert body["prompt"] == ("Why?" if raw else Words().text(3, 0))


async def test_without_a_usage_outputs_are_counted() -> None:
    record = await ask(Answers([text("a"), text("b", "length"), DONE]))
    assert record.output_tokens == 2


@pytest.mark.parametrize("said", [None, "7", [], {}])
async def test_a_usage_without_numbers_is_none(said: Any) -> None:
    told = {"choices": [], "usage": {"prompt_tokens": said, "completion_tokens": said}}
    record = await ask(Answers([text("a"), text("b", "length"), told, DONE]))
    assert (record.input_tokens, record.output_tokens) == (0, 2)


async def test_a_connection_serves_one_request_after_another() -> None:
    answers = Answers([text("a", "length"), usage(3, 1), DONE])
    await ask(answers, times=3)
    assert answers.connections == 1


async def test_an_output_is_noted_when_it_comes() -> None:
    came, pause = asyncio.Event(), asyncio.Event()

    def clock() -> float:
        came.set()
        return 1.0

    answers = Answers([text("a"), text("b", "length")], pause=pause)
    async with serving(answers) as url, OpenAI(Server(at=url, model="tiny", timeout_s=WAIT_S)) as target:
        record = Record(0, 0.0, 0.0)
        answering = asyncio.create_task(target.answer(target.prepare(PLANNED), record, clock))
        await asyncio.wait_for(came.wait(), WAIT_S)
        assert not answering.done()
        pause.set()
        await answering


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (Answers(status=429), "HTTP 429: .*too many requests"),
        (Answers([text("a"), {"error": {"message": "broken"}}]), "ERROR: .*broken"),
        (Answers([text("a")]), "DATA_LOSS"),
        (Answers(["what?"]), "PROTOCOL: 'what\\?'"),
        (Answers([{"usage": "none"}]), "PROTOCOL: "),
        (Answers(["[" * 100_000]), "PROTOCOL: "),
    ],
)
async def test_an_answer_that_is_none_is_refused(answers: Answers, words: str) -> None:
    with pytest.raises(Refused, match=words):
        await ask(answers)


async def test_a_server_that_does_not_answer_in_time_is_given_up() -> None:
    pause = asyncio.Event()
    answers = Answers([text("a", "length")], pause=pause)
    async with serving(answers) as url, OpenAI(Server(at=url, model="tiny", timeout_s=0.05)) as target:
        with pytest.raises(Refused, match=r"DEADLINE_EXCEEDED|Timeout"):
            await target.answer(target.prepare(PLANNED), Record(0, 0.0, 0.0), lambda: 0.0)
        pause.set()


async def test_it_is_ready_if_it_has_the_model() -> None:
    async with serving(Answers()) as url:
        async with OpenAI(Server(at=f"{url}/v1/", model="tiny")) as target:
            await target.ready()
            assert target.context_tokens == 99
        async with OpenAI(Server(at=url, model="other")) as target:
            with pytest.raises(Refused, match="NOT_FOUND: model 'other'; the server has tiny"):
                await target.ready()


async def test_a_server_that_fails_without_a_word_is_told_of_by_the_kind_of_its_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def silent(*_: object, **__: object) -> None:
        raise httpx2.ReadTimeout("")

    async with OpenAI(Server(at="http://127.0.0.1:1", model="tiny")) as target:
        monkeypatch.setattr(httpx2.AsyncClient, "get", silent)
        with pytest.raises(Refused, match="/models: ReadTimeout"):
            await target.ready()


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ("localhost:8000", "no http"),
        ("http://example.org", "no key goes there"),
        ("http://127.0.0.1:99999", "a port that is none"),
        ("http://[::1", "is no address: Invalid port"),
    ],
)
def test_an_address_that_will_not_do_is_refused(at: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        OpenAI(Server(at=at, model="tiny", api_key="secret"))


def test_a_key_that_no_header_can_hold_is_refused() -> None:
    with pytest.raises(Refused, match="only characters of ASCII"):
        OpenAI(Server(at="http://127.0.0.1:1", model="tiny", api_key="\xe9"))


async def test_words_are_measured_by_the_servers_own_count() -> None:
    answers = Answers([text("a", "length"), DONE])

    class Counted(OpenAI):
        async def answer(self, request: Any, record: Record, clock: Any) -> None:
            await super().answer(request, record, clock)
            record.input_tokens = 5 + 2 * len(request[1]["prompt"].split())

    async with serving(answers) as url, Counted(Server(at=url, model="tiny")) as target:
        assert await target.words() == Words(per_word=2.0, extra=5.0)
