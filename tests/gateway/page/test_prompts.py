"""The box for a prompt: the answer line by line, its errors, the samples, and what a browser that goes away leaves."""

import asyncio
import json
from pathlib import Path

import httpx2
import pytest

from gateway.page import prompts
from protos.link.v1 import gateway_link_pb2 as pb
from tests.gateway.harness import WAIT_S, ending, ids, model_info
from tests.gateway.page.pages import SAME_SITE, page
from tests.gateway.test_cells import service
from tests.waiting import until


async def test_an_answer_comes_line_by_line_with_its_rounds() -> None:
    async with page() as (_, _, link, client):
        asking = asyncio.create_task(client.post("/page/prompt", json={"prompt": "Hi", "max_tokens": 8}))
        submit = await link.accept()
        tokens = ids("the fox")
        await link.delta(submit, 0, tokens, drafted=4, accepted=len(tokens) - 1)
        await link.delta(submit, len(tokens), ending=ending(preemptions=2))
        answer = await asking
        assert answer.headers["content-type"] == "application/x-ndjson"
        first, *chunks = [json.loads(line) for line in answer.text.splitlines()]
        assert first == {"id": submit.request_id, "prompt_tokens": len(submit.prompt)}
        assert "".join(chunk["text"] for chunk in chunks) == "the fox"
        assert [len(tokens), 4, len(tokens) - 1] in [round for chunk in chunks for round in chunk["rounds"]]
        assert chunks[-1]["final"]["pauses"] == 2


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("nonsense", "body: is not JSON"),
        ("[" * 100_000, "body: is not JSON"),
        ("[]", "prompt: write something"),
        ('{"prompt": 7}', "prompt: write something"),
        ('{"prompt": " "}', "prompt: write something"),
        ('{"prompt": "' + "a" * (prompts.MOST_CHARACTERS + 1) + '"}', "prompt: 8001 characters"),
        ('{"prompt": "a\\ud800"}', "prompt: holds half a character"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens: must be a whole number"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens: must be a whole number"),
    ],
)
async def test_bad_input_names_the_field(body: str, problem: str) -> None:
    async with page() as (_, _, _, client):
        answer = await client.post("/page/prompt", content=body, headers=SAME_SITE)
        assert answer.status_code == 400
        assert problem in answer.json()["error"]["message"]


async def test_a_model_that_knows_no_conversations_gets_the_bare_prompt() -> None:
    async with page(model=model_info(context_tokens=1024, template="")) as (_, _, link, client):
        asking = asyncio.create_task(client.post("/page/prompt", json={"prompt": "the fox", "max_tokens": 8}))
        submit = await link.accept()
        assert list(submit.prompt) == [*ids("<bos>"), *ids("the fox")]
        await link.delta(submit, 0, ending=ending())
        assert (await asking).status_code == 200


async def test_where_several_models_are_served_the_first_one_answers(tmp_path: Path) -> None:
    other = model_info(fingerprint="two", context_tokens=1024)
    other.name = "other"
    async with service(tmp_path, a=model_info(context_tokens=1024), b=other) as made:
        link = made.links["a"][0]
        async with httpx2.AsyncClient(base_url=f"http://{made.gateways[0].http}", timeout=WAIT_S) as client:
            asking = asyncio.create_task(client.post("/page/prompt", json={"prompt": "Hi", "max_tokens": 8}))
            submit = await link.accept()
            await link.delta(submit, 0, ending=ending())
            assert (await asking).status_code == 200
            assert (await client.post("/page/samples", json={})).status_code == 202
            for _ in prompts.SAMPLES:
                submit = await link.next("submit")
                await link.send(refusals=[pb.Refusal(request_id=submit.request_id, code=8, message="full")])


async def test_a_refusal_before_the_answer_is_a_status() -> None:
    async with page() as (_, _, link, client):
        asking = asyncio.create_task(client.post("/page/prompt", json={"prompt": "Hi", "max_tokens": 8}))
        submit: pb.Submit = await link.next("submit")
        await link.send(refusals=[pb.Refusal(request_id=submit.request_id, code=8, message="full")])
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["message"]) == (429, "full")


async def test_an_error_in_an_answer_is_its_last_line() -> None:
    async with page() as (_, _, link, client):
        asking = asyncio.create_task(client.post("/page/prompt", json={"prompt": "Hi", "max_tokens": 8}))
        submit = await link.accept()
        await link.delta(submit, 0, ending=ending(5, message="the device is on fire"))
        *_, last = (await asking).text.splitlines()
        assert json.loads(last)["error"]["message"] == "the device is on fire"


async def test_a_browser_that_goes_away_ends_its_request() -> None:
    async with page() as (_, _, link, client):

        async def look_and_leave() -> None:
            async with client.stream("POST", "/page/prompt", json={"prompt": "Hi", "max_tokens": 8}) as answer:
                await anext(answer.aiter_lines())

        leaving = asyncio.create_task(look_and_leave())
        submit = await link.accept()
        await leaving
        cancel = await link.next("cancel")
        assert cancel.request_id == submit.request_id


async def test_the_samples_are_sent_at_once_and_never_twice_at_a_time() -> None:
    async with page() as (_, _, link, client):
        assert (await client.post("/page/samples", json={})).json() == {"sent": len(prompts.SAMPLES)}
        again = await client.post("/page/samples", json={})
        assert (again.status_code, again.json()["error"]["message"]) == (429, "the samples are still running")
        for _ in prompts.SAMPLES:
            submit = await link.next("submit")
            await link.send(refusals=[pb.Refusal(request_id=submit.request_id, code=8, message="full")])

        async def over() -> bool:
            return (await client.post("/page/samples", json={})).status_code == 202

        await until(over, WAIT_S)
