"""The package `openai`, versions 2 and 3: what its users do most, on a real model. Usage: URL MODEL."""

import asyncio
import json
import sys
from typing import Any

import openai

URL, MODEL = sys.argv[1:]
MESSAGES: Any = [{"role": "user", "content": "Why is the sky blue?"}]
GREEDY: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24, "seed": 1}


def synchronous(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    plain = client.chat.completions.create(**GREEDY)
    text = plain.choices[0].message.content
    assert text
    assert plain.usage
    assert plain.usage.completion_tokens == 24

    stream = client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage
    assert chunks[-1].usage.total_tokens == plain.usage.total_tokens

    seen = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3)
    content = seen.choices[0].logprobs.content
    assert b"".join(bytes(each.bytes or []) for each in content or []).decode() == text
    assert all(len(each.top_logprobs) == 3 for each in content or [])

    sampled = [
        client.chat.completions.create(**(GREEDY | {"temperature": 1, "n": 2, "seed": 5})).choices for _ in range(2)
    ]
    assert [each.message.content for each in sampled[0]] == [each.message.content for each in sampled[1]]
    assert sampled[0][0].message.content != sampled[0][1].message.content

    older = client.completions.create(
        model=MODEL, prompt=["1, 2, 3, 4,", "a, b, c,"], temperature=0, max_tokens=4, echo=True
    )
    assert older.choices[0].text.startswith("1, 2, 3, 4, 5")
    assert older.choices[1].text.startswith("a, b, c, d")


def structured(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"sky": {"enum": ["blue", "red"]}},
        "required": ["sky"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "sky", "schema": schema, "strict": True}}
    said = client.chat.completions.create(**GREEDY, response_format=wanted).choices[0].message.content
    assert json.loads(said or "").keys() == {"sky"}
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("look", "paint")]
    called = client.chat.completions.create(**GREEDY, tools=tools, tool_choice="required").choices[0]
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls or []
    assert call.function.name in ("look", "paint")
    assert json.loads(call.function.arguments).keys() == {"sky"}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    further = GREEDY | {"messages": [*GREEDY["messages"], called.message, result], "tools": tools}
    free = client.chat.completions.create(**further).choices[0]  # words or a call, as the model likes
    assert bool(free.message.content) or free.finish_reason == "tool_calls"


def embedded(client: openai.OpenAI) -> None:
    """The package asks for base64 by default, and makes numbers of it."""
    one, other, again = client.embeddings.create(model=MODEL, input=["the sky", "a fox", "the sky"]).data
    assert one.embedding == again.embedding != other.embedding
    plain = client.embeddings.create(model=MODEL, input="the sky", encoding_format="float")
    assert max(abs(a - b) for a, b in zip(plain.data[0].embedding, one.embedding, strict=True)) < 1e-5
    assert plain.usage.prompt_tokens > 0


def errors(client: openai.OpenAI) -> None:
    for wrong, kind in (
        ({"temperature": 9}, openai.BadRequestError),
        ({"model": "other"}, openai.NotFoundError),
        ({"max_tokens": 10**6}, openai.BadRequestError),
    ):
        try:
            client.chat.completions.create(**(GREEDY | wrong))
        except kind as error:
            told = error
        else:
            raise AssertionError(f"{wrong} was taken")
        assert told.code


async def many() -> None:
    """A hundred seeded streams at once: each is what it is alone."""

    async def read(client: openai.AsyncOpenAI, seed: int) -> str:
        asked: Any = GREEDY | {"temperature": 1, "seed": seed, "max_tokens": 8}
        stream = await client.chat.completions.create(**asked, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async with openai.AsyncOpenAI(base_url=URL, max_retries=0, timeout=240) as client:
        texts = await asyncio.gather(*(read(client, seed) for seed in range(100)))
        assert texts[17] == await read(client, 17)
        assert len(set(texts)) > 50


with openai.OpenAI(base_url=URL) as client:
    synchronous(client)
    structured(client)
    embedded(client)
    errors(client)
asyncio.run(many())
