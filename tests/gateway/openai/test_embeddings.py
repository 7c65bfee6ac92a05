"""POST /v1/embeddings: inputs of every kind, both encodings, and what is refused by name."""

import asyncio

import grpc
import pytest
from openai import AsyncOpenAI

from gateway.openai import embeddings
from protos.link.v1 import common_pb2
from protos.link.v1 import gateway_link_pb2 as pb
from tests.gateway.harness import TOKENIZER, ending, ids
from tests.gateway.openai.harness import Door, door

PATH = "/v1/embeddings"
EMBEDDING = {"model": "tiny", "input": "the fox"}


def full(submit: pb.Submit) -> pb.Refusal:
    return pb.Refusal(request_id=submit.request_id, code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="full")


async def made(at: Door, count: int) -> list[list[int]]:
    """The prompts of so many requests, each answered with a vector of its length."""
    prompts = []
    for _ in range(count):
        submit = await at.link.accept()
        assert (submit.sampling.embedding, submit.limits.max_tokens) == (True, 0)
        prompts.append(list(submit.prompt))
        told = common_pb2.Logprobs(embedding=[0.5, float(len(submit.prompt))])
        await at.link.delta(submit, 0, [1], logprobs=told, ending=ending())
    return prompts


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("fox", [[0, *ids("fox")]]),
        (ids("fox"), [ids("fox")]),
        (["fox", "the dog"], [[0, *ids("fox")], [0, *ids("the dog")]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
async def test_an_input_is_text_or_tokens_or_a_list_of_either(given: object, prompts: list[list[int]]) -> None:
    async with door() as at:
        task = at.asked(EMBEDDING | {"input": given}, PATH)
        assert sorted(await made(at, len(prompts))) == sorted(prompts)
        said = (await task).json()
        assert said["object"] == "list"
        assert said["data"] == [
            {"object": "embedding", "index": index, "embedding": [0.5, float(len(prompt))]}
            for index, prompt in enumerate(prompts)
        ]
        tokens = sum(map(len, prompts))
        assert said["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


async def test_more_inputs_than_the_gateway_has_places_are_made_one_after_another() -> None:
    async with door(max_requests=2) as at:
        task = at.asked(EMBEDDING | {"input": ["fox"] * 5}, PATH)
        await made(at, 5)
        assert len((await task).json()["data"]) == 5


async def test_an_input_without_room_waits_for_the_others_of_its_body() -> None:
    async with door() as at:
        task = at.asked(EMBEDDING | {"input": ["fox", "dog"]}, PATH)
        first, second = await at.link.next("submit"), await at.link.next("submit")
        await at.link.send(accepted=[first.request_id])
        await at.link.send(refusals=[full(second)])
        told = common_pb2.Logprobs(embedding=[0.5, float(len(first.prompt))])
        await at.link.delta(first, 0, [1], logprobs=told, ending=ending())
        assert await made(at, 1) == [list(second.prompt)]
        assert len((await task).json()["data"]) == 2


async def test_a_body_far_beyond_the_bound_is_not_asked_for_again_and_again() -> None:
    inputs, asked, has_room = 40, 0, True
    async with door() as at:
        task = at.asked(EMBEDDING | {"input": ["fox"] * inputs}, PATH)
        runs: list[pb.Submit] = []
        for _ in range(inputs):
            while has_room or at.link.received.qsize():  # one runs at a time, and others are refused meanwhile
                submit, asked = await at.link.next("submit"), asked + 1
                if has_room:
                    await at.link.send(accepted=[submit.request_id])
                    runs.append(submit)
                else:
                    await at.link.send(refusals=[full(submit)])
                has_room = False
                await asyncio.sleep(0)
            told = common_pb2.Logprobs(embedding=[0.5, 1.0])
            await at.link.delta(runs[-1], 0, [1], logprobs=told, ending=ending())
            has_room = True
        assert len((await task).json()["data"]) == inputs
    assert asked < 3 * inputs


async def test_where_others_have_the_room_the_body_is_refused() -> None:
    async with door() as at:
        task = at.asked(EMBEDDING | {"input": ["fox", "dog"]}, PATH)
        await at.link.send(refusals=[full(await at.link.next("submit")) for _ in range(2)])
        assert (await task).status_code == 429


async def test_the_client_of_openai_reads_both_encodings() -> None:
    async with door() as at, AsyncOpenAI(base_url=f"{at.url}/v1", api_key="none", max_retries=0) as client:
        for encoding in ({}, {"encoding_format": "float"}):
            task = asyncio.create_task(client.embeddings.create(model="tiny", input="the fox", **encoding))
            (prompt,) = await made(at, 1)
            assert (await task).data[0].embedding == [0.5, float(len(prompt))]


async def test_what_is_not_there_is_refused_by_name() -> None:
    wrong = [
        ({"dimensions": 2}, "dimensions"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [TOKENIZER.get_vocab_size()]}, "input"),
        ({"input": "the " * 200}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
    ]
    async with door() as at:
        for fields, named in wrong:
            error = await at.refused(EMBEDDING | fields, PATH)
            assert (error["status"], error["param"]) == (400, named), (fields, error)
        assert at.link.received.empty()


async def test_an_engine_that_has_none_says_so() -> None:
    async with door(engine={"refused": {"embedding": "not here"}}) as at:
        error = await at.refused(EMBEDDING, PATH)
        assert (error["status"], error["message"]) == (400, "model: embeddings are not here")
        (card,) = (await at.http.get("/v1/models")).json()["data"]
        assert "embeddings" not in card


async def test_one_time_limit_holds_for_all_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits until the first has ended, and has what is left."""
    monkeypatch.setattr(embeddings, "AT_ONCE", 1)
    async with door() as at:
        task = at.asked(EMBEDDING | {"input": ["fox", "dog"], "timeout_s": 3600}, PATH)
        first = await at.link.accept()
        later = embeddings.now() + 1
        monkeypatch.setattr(embeddings, "now", lambda: later)
        told = common_pb2.Logprobs(embedding=[0.5])
        await at.link.delta(first, 0, [1], logprobs=told, ending=ending())
        second = await at.link.accept()
        assert second.timeout_s < first.timeout_s - 0.9
        await at.link.delta(second, 0, [1], logprobs=told, ending=ending())
        assert (await task).status_code == 200


async def test_each_input_counts_as_a_request() -> None:
    async with door() as at:
        task = at.asked(EMBEDDING | {"input": ["fox", "the dog"]}, PATH)
        tokens = sum(map(len, await made(at, 2)))
        assert (await task).status_code == 200
        said = (await at.http.get("/metrics")).text
        assert 'laps_sd_request_success_total{finished_reason="length",model_name="tiny"} 2.0' in said
        assert f'laps_sd_prompt_tokens_total{{model_name="tiny"}} {float(tokens)}' in said
