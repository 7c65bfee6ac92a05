"""Completions over HTTP: prompts of every kind, echo, and log-probabilities in their older shape."""

import pytest

from tests.gateway.harness import ending, ids
from tests.gateway.openai.harness import COMPLETION, door, events, logprobs


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


@pytest.mark.parametrize("prompt", ["the fox", ids("the fox")])
@pytest.mark.parametrize("stream", [True, False])
async def test_echo_puts_the_prompt_in_front(prompt: object, stream: bool) -> None:
    async with door() as at:
        answer, _ = await at.answered(COMPLETION | {"prompt": prompt, "echo": True, "stream": stream}, " jumps")
        said = events(answer)[:-1] if stream else [answer.json()]
        assert "".join(each["choices"][0]["text"] for each in said) == "the fox jumps"


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
