"""Bad input, field by field: INVALID_ARGUMENT with a message that starts with the field's name; and the defaults."""

import asyncio
import math
from typing import Any

import pytest

from gateway import validate
from gateway.structure import Structures
from gateway.text import TextModel
from protos.errors import BadInput, ContextExceeded
from protos.link.v1 import gateway_link_pb2 as pb
from protos.v1 import inference_pb2
from protos.v1.types_pb2 import Structure
from tests.gateway.harness import CONTEXT_TOKENS, ids, model_info, stack

MODEL = TextModel(model_info())
LONG = "the " * 200


def chat(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


BAD = [
    ({}, "input: give one of prompt, chat and tokens"),
    ({"prompt": ""}, "prompt: must not be empty"),
    ({"prompt": LONG}, "prompt: 202 tokens leave no room"),
    ({"prompt": "x" * 4001}, "prompt: 4001 bytes; at most 4000"),
    ({"chat": chat()}, "chat: must have at least one message"),
    ({"chat": chat(("robot", "hi"))}, "chat: unknown role 'robot' of message 0; known are"),
    ({"chat": chat(("user", "hi"), ("system", "late"))}, "chat: the model's template refuses"),
    ({"chat": chat(("user", LONG))}, "chat: "),
    ({"chat": chat(*[("user", "")] * 1000)}, "chat: 8000 bytes; at most 4000"),
    ({"tokens": {"ids": []}}, "tokens: must not be empty"),
    ({"tokens": {"ids": [1, MODEL.vocab_size]}}, "tokens: "),
    ({"tokens": {"ids": [1] * CONTEXT_TOKENS}}, "tokens: 64 tokens leave no room"),
    ({"prompt": "a", "temperature": math.nan}, "temperature: must be in [0, 2]"),
    ({"prompt": "a", "temperature": -0.1}, "temperature: must be in [0, 2]"),
    ({"prompt": "a", "temperature": 2.1}, "temperature: must be in [0, 2]"),
    ({"prompt": "a", "temperature": math.inf}, "temperature: must be in [0, 2]"),
    ({"prompt": "a", "top_p": 0.0}, "top_p: must be in (0, 1]"),
    ({"prompt": "a", "top_p": 1.1}, "top_p: must be in (0, 1]"),
    ({"prompt": "a", "top_p": math.nan}, "top_p: must be in (0, 1]"),
    ({"prompt": "a", "top_k": MODEL.vocab_size + 1}, "top_k: "),
    ({"prompt": "a", "repetition_penalty": 0.0}, "repetition_penalty: must be in [0.01, 2]"),
    ({"prompt": "a", "repetition_penalty": math.nan}, "repetition_penalty: must be in [0.01, 2]"),
    ({"prompt": "a", "presence_penalty": 2.1}, "presence_penalty: must be in [-2, 2]"),
    ({"prompt": "a", "frequency_penalty": math.nan}, "frequency_penalty: must be in [-2, 2]"),
    ({"prompt": "a", "logit_bias": {MODEL.vocab_size: 1.0}}, "logit_bias: token"),
    ({"prompt": "a", "logit_bias": {3: math.nan}}, "logit_bias: must be in [-100, 100]"),
    ({"prompt": "a", "logit_bias": dict.fromkeys(range(301), 1.0)}, "logit_bias: 301 tokens; at most 300"),
    ({"prompt": "a", "logprobs": 21}, "logprobs: 21 alternatives; at most 20"),
    ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs: 21 alternatives; at most 20"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens: must be at least 1"),
    (
        {"prompt": "a", "max_tokens": 63},
        "max_tokens: prompt of 2 tokens + max_tokens 63 exceeds the context of 64; at most 62",
    ),
    ({"prompt": "a", "max_tokens": 2**32 - 1}, "max_tokens: prompt of 2 tokens"),
    ({"prompt": "a", "max_tokens": 4, "min_tokens": 5}, "min_tokens: 5 exceeds max_tokens 4"),
    ({"prompt": "a", "min_tokens": 63}, "min_tokens: 63 exceeds max_tokens 62"),
    ({"prompt": "a", "stop": ["."] * 9}, "stop: 9 strings; at most 8"),
    ({"prompt": "a", "stop": [""]}, "stop: each string must have 1 to 128"),
    ({"prompt": "a", "stop": ["x" * 129]}, "stop: each string must have 1 to 128"),
    ({"prompt": "a", "predicted_tokens": 0}, "predicted_tokens: must be at least 1"),
    (
        {"prompt": "a", "ignore_eos": True, "structure": Structure(regex="a")},
        "ignore_eos: an output with a structure ends",
    ),
    ({"prompt": "a", "priority": 9}, "priority: unknown value 9"),
    ({"prompt": "a", "on_disconnect": 9}, "on_disconnect: unknown value 9"),
    ({"prompt": "a", "request_id": "x" * 129}, "request_id: must have 1 to 128"),
    ({"prompt": "a", "request_id": "no spaces"}, "request_id: must have 1 to 128"),
]


async def checked(request: inference_pb2.GenerateRequest) -> pb.Submit:
    return await validate.submission(
        request,
        MODEL,
        tenant="t",
        timeout_s=1,
        max_input_bytes=4000,
        encoders=asyncio.Semaphore(),
        structures=Structures(),
    )


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[message[:40] for _, message in BAD])
async def test_bad_input_names_its_field(fields: dict[str, Any], message: str) -> None:
    request = inference_pb2.GenerateRequest(**fields)
    with pytest.raises(BadInput) as refusal:
        await checked(request)
    assert refusal.value.message.startswith(message)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"logit_bias": {3: 1.0}}, True),
        ({"logit_bias": {}}, False),
        ({"structure": Structure(regex="a")}, True),
        ({"presence_penalty": 0.5}, True),
        ({"presence_penalty": 0.0}, False),
    ],
)
def test_a_field_that_the_engine_cannot_serve_is_refused_where_it_would_matter(
    fields: dict[str, Any], refused: bool
) -> None:
    names = ("logit_bias", "structure", "presence_penalty")
    model = TextModel(model_info(refused=dict.fromkeys(names, "not with this engine")))
    request = inference_pb2.GenerateRequest(prompt="a", **fields)
    if not refused:
        validate.check_served(request, model)
        return
    with pytest.raises(BadInput) as refusal:
        validate.check_served(request, model)
    assert refusal.value.message == f"{next(iter(fields))}: not with this engine"


async def test_a_chat_for_a_model_without_template_is_refused() -> None:
    request = inference_pb2.GenerateRequest(chat=chat(("user", "hi")))
    with pytest.raises(BadInput, match=r"^chat: .*no chat template"):
        await validate.encode_input(
            request, TextModel(model_info(template="")), max_bytes=4000, encoders=asyncio.Semaphore()
        )


async def test_bad_input_reaches_the_client_as_a_status_and_never_the_scheduler() -> None:
    async with stack() as (_, link, client):
        with pytest.raises(BadInput, match=r"^temperature: "):
            await client.complete("a", temperature=3.0)
        assert link.received.empty()


async def test_a_token_of_the_tokenizer_that_the_model_does_not_have_is_the_texts_fault() -> None:
    info = model_info()
    info.vocab_size = 2
    request = inference_pb2.GenerateRequest(prompt="the fox")
    with pytest.raises(BadInput, match=r"prompt: its token \d+ exceeds the vocabulary of 2"):
        await validate.encode_input(request, TextModel(info), max_bytes=1 << 20, encoders=asyncio.Semaphore())


async def test_a_long_prompt_is_encoded_like_a_short_one() -> None:
    text = "the quick brown fox " * 600
    model = TextModel(model_info(context_tokens=100_000))
    request = inference_pb2.GenerateRequest(prompt=text)
    assert len(text) > validate.THREAD_ABOVE_BYTES
    encoded = await validate.encode_input(request, model, max_bytes=1 << 20, encoders=asyncio.Semaphore())
    assert encoded == [model.encode_prompt("a")[0], *ids(text)]


def test_the_default_of_max_tokens_takes_what_the_context_leaves() -> None:
    request = inference_pb2.GenerateRequest(prompt="a")
    assert validate.limits(request, 60, CONTEXT_TOKENS).max_tokens == 4
    assert validate.limits(request, 60, 4096).max_tokens == 256


def test_a_seed_follows_from_the_requests_id_unless_given() -> None:
    request = inference_pb2.GenerateRequest(prompt="a")
    seeds = [validate.sampling(request, id).seed for id in ("one", "one", "other")]
    assert seeds[0] == seeds[1] != seeds[2]
    request.seed = 2**64 - 1
    assert validate.sampling(request, "one").seed == 2**64 - 1


async def test_the_bounds_of_a_penalty_belong_to_it() -> None:
    """On the wire 0.01 is a little less: it has four bytes."""
    for penalty in (0.01, 2.0):
        request = inference_pb2.GenerateRequest(prompt="a", repetition_penalty=penalty)
        assert (await checked(request)).sampling.repetition_penalty == pytest.approx(penalty)


async def test_a_guess_may_be_above_max_tokens() -> None:
    """What is learned of guesses would be wrong if bounds had cut them."""
    async with stack() as (_, link, client):
        task = asyncio.create_task(client.complete("a", max_tokens=5, predicted_tokens=50))
        assert (await link.accept()).predicted_tokens == 50
        task.cancel()


async def test_tokens_that_do_not_fit_are_refused_before_each_is_looked_at() -> None:
    request = inference_pb2.GenerateRequest()
    request.tokens.ids.extend([2**32 - 1] * CONTEXT_TOKENS)  # none of them is in the vocabulary
    with pytest.raises(ContextExceeded):
        await validate.encode_input(request, TextModel(model_info()), max_bytes=1, encoders=asyncio.Semaphore())
