"""Requests that begin alike go to one cell, whose workers may have the keys and values of that beginning."""

import asyncio
from pathlib import Path

import httpx2

from gateway.beginnings import CHARS, TOKENS, beginning
from protos.v1.inference_pb2 import Chat, ChatMessage, GenerateRequest, TokenIds
from tests.gateway.harness import ending, ids, model_info
from tests.gateway.test_cells import DRAWN, NAMES, Service, answered, load, service
from tests.waiting import until

LARGE = model_info(context_tokens=4096)


async def test_requests_that_begin_alike_go_to_one_cell_while_it_has_room(tmp_path: Path) -> None:
    head = "You are a helpful assistant. " * 40
    async with service(tmp_path, a=LARGE, b=LARGE) as made:

        async def loads(a: int, b: int) -> None:
            for name, free in (("a", a), ("b", b)):
                await load(made.links[name][0], 0.0, free)
            await until(lambda: told(made, a, b))

        await loads(99, 99)
        own = (await answered(made, 0, await place(made, head), prompt=head)).partition("-")[0]
        for end in ("one", "two", "three"):
            await answered(made, 0, own, prompt=head + end)
        other = "b" if own == "a" else "a"
        await loads(*((0, 99) if own == "a" else (99, 0)))
        await answered(made, 0, other, prompt=head + "four")


async def test_choices_asked_for_over_http_go_there_too_and_carry_its_name(tmp_path: Path) -> None:
    head = "You are a helpful assistant. " * 40
    async with service(tmp_path, a=LARGE, b=LARGE) as made, httpx2.AsyncClient() as http:
        for name in NAMES:
            await load(made.links[name][0], 0.0, 99)
        await until(lambda: told(made, 99, 99))
        own = await place(made, head)
        body = {"model": "tiny", "prompt": head + "one", "n": 2}
        asking = asyncio.create_task(http.post(f"http://{made.gateways[0].http}/v1/completions", json=body))
        link = made.links[own][0]
        submits = [await link.accept(), await link.accept()]
        for submit in submits:
            await link.delta(submit, 0, ids(" fox"), ending=ending())
        answer = (await asking).json()
        id = answer["id"].removeprefix("cmpl-")
        assert id.startswith(f"{own}-")
        assert {submit.request_id for submit in submits} == {f"{id}-0", f"{id}-1"}


async def told(made: Service, a: int, b: int) -> bool:
    links = made.gateways[0].cells.links
    return [links[name]._load.free_slots for name in NAMES] == [a, b]


async def place(made: Service, prompt: str) -> str:
    """The cell of what begins so."""
    begins = beginning(GenerateRequest(prompt=prompt), "default")
    return made.gateways[0].cells.new_id("tiny", 1, DRAWN, begins).partition("-")[0]


def test_inputs_begin_alike_for_one_tenant_and_only_where_there_is_something_to_share() -> None:
    system = ChatMessage(role="system", content="x" * CHARS)
    chats = [Chat(messages=[system, ChatMessage(role="user", content=text)]) for text in ("one", "two")]
    one, two = (beginning(GenerateRequest(chat=chat), "acme") for chat in chats)
    assert one == two != beginning(GenerateRequest(chat=chats[0]), "other")
    assert beginning(GenerateRequest(prompt="x" * (CHARS - 1)), "acme") == ""
    ids = [*range(TOKENS)]
    assert beginning(GenerateRequest(tokens=TokenIds(ids=[*ids, 1])), "acme") == beginning(
        GenerateRequest(tokens=TokenIds(ids=[*ids, 2])), "acme"
    )
    assert beginning(GenerateRequest(tokens=TokenIds(ids=ids[1:])), "acme") == ""
