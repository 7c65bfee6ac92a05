"""Completions over HTTP: prompts of every kind, echo, and log-probabilities in their older shape."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from gateway import validate
from gateway.openai.logprobs import ForCompletion, for_chat
from gateway.openai.token_bytes import TokenBytes
from gateway.text import TextModel
from protos.link.v1 import common_pb2
from protos.link.v1 import gateway_link_pb2 as pb
from protos.v1 import types_pb2
from protos.v1.inference_pb2 import GenerateRequest
from tests.gateway.harness import TOKENIZER, ending, ids
from tests.gateway.openai.harness import COMPLETION, door, events, logprobs
from tests.gateway.openai.test_token_bytes import LIKE_LLAMA, sentencepiece


async def test_a_plain_answer() -> None:
    async with door() as at:
        answer, submit = await at.answered(COMPLETION, "jumps")
        said = answer.json()
        assert said["object"] == "text_completion"
        assert said["id"] == f"cmpl-{submit.request_id}"
        assert said["choices"] == [{"index": 0, "text": "jumps", "logprobs": None, "finish_reason": "stop"}]
        assert submit.limits.max_tokens == 16


async def test_a_stream() -> None:
    async with door() as at:
        answer, _ = await at.answered(COMPLETION | {"stream": True}, "jumps")
        *said, done = events(answer)
        assert done == "[DONE]"
        assert "".join(each["choices"][0]["text"] for each in said) == "jumps"
        assert [each["choices"][0]["finish_reason"] for each in said] == [None] * (len(said) - 1) + ["stop"]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("fox", [[0, *ids("fox")]]),
        (ids("fox"), [ids("fox")]),
        (["fox", "dog"], [[0, *ids("fox")], [0, *ids("dog")]]),
        ([ids("fox"), ids("dog")], [ids("fox"), ids("dog")]),
    ],
)
async def test_a_prompt_is_text_or_tokens_or_a_list_of_either(prompt: object, prompts: list[list[int]]) -> None:
    async with door() as at:
        task = at.asked(COMPLETION | {"prompt": prompt, "n": 2, "seed": 7})
        submits = [await at.link.accept() for _ in range(2 * len(prompts))]
        assert [list(each.prompt) for each in submits] == [each for each in prompts for _ in range(2)]
        assert {each.sampling.seed for each in submits[::2]} == {7}  # each prompt is answered as if it were alone
        for number, submit in enumerate(submits):
            await at.say(submit, str(number))
        said = (await task).json()
        assert [(each["index"], each["text"]) for each in said["choices"]] == [
            (number, str(number)) for number in range(len(submits))
        ]
        assert said["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_a_prompt_is_encoded_once_for_all_its_choices_and_stays_the_input_that_was_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded, encode = list[str](), validate._encode

    def counted(request: GenerateRequest, *rest: Any) -> list[int]:
        encoded.append(request.prompt)
        return encode(request, *rest)

    monkeypatch.setattr(validate, "_encode", counted)
    async with door() as at:
        task = at.asked(COMPLETION | {"prompt": ["fox", "dog"], "n": 3})
        submits = [await at.link.accept() for _ in range(6)]
        assert encoded == ["fox", "dog"]
        assert [list(each.prompt) for each in submits] == [[0, *ids("fox")]] * 3 + [[0, *ids("dog")]] * 3
        for submit in submits:
            await at.say(submit, "a")
        await task
        _, alone = await at.answered(COMPLETION | {"prompt": "dog"})
        assert {each.input_digest for each in submits[3:]} == {alone.input_digest} != {submits[0].input_digest}


@pytest.mark.parametrize("prompt", ["the fox", ids("the fox")])
@pytest.mark.parametrize("stream", [True, False])
async def test_echo_puts_the_prompt_in_front(prompt: object, stream: bool) -> None:
    async with door() as at:
        answer, _ = await at.answered(COMPLETION | {"prompt": prompt, "echo": True, "stream": stream}, " jumps")
        said = events(answer)[:-1] if stream else [answer.json()]
        assert "".join(each["choices"][0]["text"] for each in said) == "the fox jumps"


async def test_a_prompt_of_tokens_is_made_text_once_for_all_its_choices_and_no_stream_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded, decode = list[list[int]](), TextModel.decode

    def in_a_thread(model: TextModel, token_ids: list[int], **how: bool) -> str:
        assert threading.current_thread() is not threading.main_thread()
        decoded.append(token_ids)
        return decode(model, token_ids, **how)

    monkeypatch.setattr(TextModel, "decode", in_a_thread)
    prompts = [ids("the fox"), ids("a dog")]
    async with door() as at:
        task = at.asked(COMPLETION | {"prompt": prompts, "echo": True, "n": 3})
        for _ in range(6):
            await at.say(await at.link.accept(), "!")
        said = (await task).json()["choices"]
        assert [each["text"] for each in said] == ["the fox!"] * 3 + ["a dog!"] * 3
        assert decoded == prompts


async def test_log_probabilities_have_offsets_in_characters() -> None:
    async with door() as at:
        task = at.asked(COMPLETION | {"logprobs": 1})
        submit = await at.link.accept()
        tokens = ids("aä!")
        await at.link.delta(submit, 0, tokens[:1], logprobs=logprobs(tokens[:1], 1))
        await at.link.delta(submit, 1, tokens[1:], logprobs=logprobs(tokens[1:], 1), ending=ending())
        said = (await task).json()["choices"][0]["logprobs"]
        assert said["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa4", "!"]
        assert said["text_offset"] == [0, 1, 1, 2]
        assert said["token_logprobs"] == [-0.5] * 4
        assert said["top_logprobs"] == [{"a": -0.5}, {"bytes:\\xc3": -0.5}, {"bytes:\\xa4": -0.5}, {"!": -0.5}]


async def test_without_alternatives_there_are_none() -> None:
    async with door() as at:
        task = at.asked(COMPLETION | {"logprobs": 0})
        submit = await at.link.accept()
        assert submit.sampling.HasField("logprobs")
        await at.link.delta(submit, 0, ids("a"), logprobs=logprobs(ids("a")), ending=ending())
        assert (await task).json()["choices"][0]["logprobs"]["top_logprobs"] == [None]


def scored(prompt: Sequence[int], top: int = 1, tokens: Sequence[int] = ()) -> common_pb2.Logprobs:
    """Of the first round, of a request that asked for its prompt's."""
    told = logprobs(tokens, top)
    told.prompt.extend(logprobs(prompt[1:], top).tokens)
    return told


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["ä fox", [0, *ids("ä fox")]])
async def test_echo_with_log_probabilities_begins_with_those_of_the_prompt(prompt: object, stream: bool) -> None:
    async with door() as at:
        task = at.asked(COMPLETION | {"prompt": prompt, "echo": True, "logprobs": 1, "stream": stream})
        submit = await at.link.accept()
        assert (submit.sampling.prompt_logprobs, submit.sampling.logprobs) == (1, 1)
        tokens = ids("!?")
        told = scored(submit.prompt, tokens=tokens[:1])
        await at.link.delta(submit, 0, tokens[:1], logprobs=told)
        await at.link.delta(submit, 1, tokens[1:], logprobs=logprobs(tokens[1:], 1), ending=ending())
        answer = await task
        parts = [each["choices"][0] for each in (events(answer)[:-1] if stream else [answer.json()])]
        assert "".join(each["text"] for each in parts) == "ä fox!?"
        said: dict[str, list[Any]] = {}
        for part in parts:
            for name, values in (part["logprobs"] or {}).items():
                said.setdefault(name, []).extend(values)
        names = ["<bos>", "bytes:\\xc3", "bytes:\\xa4", *(TOKENIZER.decode([each]) for each in ids(" fox")), "!", "?"]
        assert said["tokens"] == names
        assert said["token_logprobs"] == [None] + [-0.5] * (len(names) - 1)
        assert said["top_logprobs"] == [None, *({name: -0.5} for name in names[1:])]
        assert said["text_offset"][:4] == [0, 0, 0, 1]
        assert said["text_offset"][-2:] == [5, 6]


@pytest.mark.parametrize("apart", [True, False], ids=["the end comes alone", "the end comes with the token"])
async def test_scoring_alone_tells_nothing_of_the_token_that_was_drawn(apart: bool) -> None:
    async with door() as at:
        task = at.asked(COMPLETION | {"prompt": [5, 6, 7], "echo": True, "logprobs": 0, "max_tokens": 0})
        submit = await at.link.accept()
        assert submit.limits.max_tokens == 0
        first = {"logprobs": scored(submit.prompt, 0, [1]), "drafted": 0}
        if apart:
            await at.link.delta(submit, 0, [1], **first)
            await at.link.delta(submit, 1, ending=ending())
        else:
            await at.link.delta(submit, 0, [1], **first, ending=ending())
        said = (await task).json()
        choice = said["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (TOKENIZER.decode([5, 6, 7]), "length")
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
        assert choice["logprobs"]["top_logprobs"] == [None] * 3
        assert said["usage"]["completion_tokens"] == 0


async def test_every_choice_and_prompt_has_its_own() -> None:
    async with door() as at:
        asked = {"prompt": [[5, 6], [7, 8, 9]], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 0}
        task = at.asked(COMPLETION | asked)
        for submit in [await at.link.accept() for _ in range(4)]:
            await at.link.delta(submit, 0, [1], logprobs=scored(submit.prompt), ending=ending())
        told = [len(each["logprobs"]["tokens"]) for each in (await task).json()["choices"]]
        assert told == [2, 2, 3, 3]


@pytest.mark.parametrize("stream", [True, False])
async def test_the_prompts_own_stand_by_themselves_in_the_shape_of_vllm(stream: bool) -> None:
    async with door() as at:
        task = at.asked(COMPLETION | {"prompt": [5, 6, 7], "prompt_logprobs": 1, "stream": stream})
        submit = await at.link.accept()
        told = scored(submit.prompt)
        told.prompt[1].top_tokens[:] = [9]
        await at.link.delta(submit, 0, ids("!"), logprobs=told, ending=ending())
        answer = await task
        choices = [each["choices"][0] for each in (events(answer)[:-1] if stream else [answer.json()])]
        (said,) = [each["prompt_logprobs"] for each in choices if "prompt_logprobs" in each]
        assert choices[0]["text"] == "!"

        def entry(token: int, rank: int | None) -> dict[str, object]:
            return {"logprob": -0.5, "rank": rank, "decoded_token": TOKENIZER.decode([token])}

        assert said == [None, {"6": entry(6, 1)}, {"7": entry(7, None), "9": entry(9, 1)}]


async def test_a_worker_that_tells_nothing_of_the_prompt_is_an_error() -> None:
    """It is of an older version, and does not know the field."""
    async with door() as at:
        for asked in ({"max_tokens": 0}, {}):
            task = at.asked(COMPLETION | {"echo": True, "logprobs": 1} | asked)
            submit = await at.link.accept()
            await at.link.delta(submit, 0, ids("!"), logprobs=logprobs(ids("!"), 1), ending=ending())
            answer = await task
            assert (answer.status_code, "older version" in answer.text) == (500, True)


async def test_a_resumed_stream_has_them_only_from_the_beginning_on() -> None:
    async with door() as at:
        tokens, prompt = ids("ab"), [5, 6, 7]
        submit = pb.Submit(request_id="r", prompt=prompt)
        submit.sampling.prompt_logprobs = 1
        at.scheduler.submitted["r"] = submit
        for offset, told in ((0, 1), (1, 0)):
            task = asyncio.create_task(at.http.get(f"/v1/requests/r/stream?as=completion&offset={offset}"))
            await at.link.next("follow")
            await at.link.delta(submit, 0, tokens[:1], logprobs=scored(prompt))
            await at.link.delta(submit, 1, tokens[1:], ending=ending())
            every = events(await task)[:-1]
            said = [each["choices"][0] for each in every if each["choices"]]
            assert sum("prompt_logprobs" in each for each in said) == told


async def test_log_probabilities_of_a_resumed_answer_are_those_of_the_whole_one() -> None:
    async with door() as at:
        tokens, submit = ids("aä!?"), pb.Submit(request_id="r", prompt=[5])
        submit.sampling.logprobs = 1
        at.scheduler.submitted["r"] = submit
        told = []
        for offset in (0, 3):
            task = asyncio.create_task(at.http.get(f"/v1/requests/r/stream?as=completion&offset={offset}"))
            await at.link.next("follow")
            await at.link.delta(submit, 0, tokens, logprobs=logprobs(tokens, 1), ending=ending())
            told += [choice["logprobs"] for each in events(await task)[:-1] for choice in each["choices"]][:1]
        assert told[1] == {name: values[3:] for name, values in told[0].items()}
        assert told[1]["text_offset"] == [2, 3]


def test_where_a_tokenizer_drops_the_first_space_the_likeliest_tokens_have_none_either() -> None:
    of, entry = TokenBytes(sentencepiece(LIKE_LLAMA)), types_pb2.Logprob(logprob=-1)
    entry.top_tokens[:], entry.top_logprobs[:] = [256, 257], [-1, -2]
    said = ForCompletion(of)([256, 256], [entry, entry], True)
    assert said["tokens"] == ["the", " the"]
    assert said["top_logprobs"] == [{"the": -1, "fox": -2}, {" the": -1, " fox": -2}]
    content = for_chat([256, 256], [entry, entry], of, True)["content"]
    assert [[top["token"] for top in each["top_logprobs"]] for each in content] == [["the", "fox"], [" the", " fox"]]
    assert [each["top_logprobs"][0]["bytes"] == each["bytes"] for each in content] == [True, True]


def test_behind_its_first_token_a_resumed_answer_keeps_its_spaces() -> None:
    of, entry = TokenBytes(sentencepiece(LIKE_LLAMA)), types_pb2.Logprob(logprob=-1)
    said = ForCompletion(of, ["the"])([257], [entry], False)
    assert (said["tokens"], said["text_offset"]) == ([" fox"], [3])
