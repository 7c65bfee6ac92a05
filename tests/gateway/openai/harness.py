"""A gateway before a scripted scheduler, asked over HTTP. No assertions live here."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from gateway.app import Gateway
from protos.link.v1 import common_pb2
from protos.link.v1 import gateway_link_pb2 as pb
from tests.gateway.harness import CONTEXT_TOKENS, TEMPLATE, WAIT_S, Link, Scheduler, ending, gateway, ids, model_info
from tests.waiting import until

HELLO = [{"role": "user", "content": "the fox"}]
CHAT = {"model": "tiny", "messages": HELLO}
COMPLETION = {"model": "tiny", "prompt": "the fox"}
Answer = httpx2.Response


@dataclass
class Door:
    scheduler: Scheduler
    link: Link
    gateway: Gateway
    http: httpx2.AsyncClient

    @property
    def url(self) -> str:
        return f"http://{self.gateway.http}"

    def asked(self, body: dict[str, Any], path: str = "", **further: Any) -> "asyncio.Task[Answer]":
        """The body, posted; chats and completions find their path themselves."""
        path = path or ("/v1/chat/completions" if "messages" in body else "/v1/completions")
        return asyncio.create_task(self.http.post(path, json=body, **further))

    async def answered(self, body: dict[str, Any], text: str = "jumps", **further: Any) -> tuple[Answer, pb.Submit]:
        """The whole answer to the body, and what the scheduler was given. It answers every choice with the text."""
        task = self.asked(body, **further)
        submit = await self.link.accept()
        await self.say(submit, text)
        return await asyncio.wait_for(task, WAIT_S), submit

    async def refused(self, body: Any, path: str = "/v1/chat/completions") -> dict[str, Any]:
        """The error, of a body that never reaches the scheduler."""
        answer = await self.http.post(path, json=body)
        error: dict[str, Any] = answer.json()["error"]
        return {"status": answer.status_code, **error}

    async def say(self, submit: pb.Submit, text: str, **fields: Any) -> None:
        """Each token a round of its own, then the end."""
        tokens = ids(text)
        for i, token in enumerate(tokens):
            await self.link.delta(submit, i, [token], drafted=4, accepted=1)
        await self.link.delta(submit, len(tokens), ending=ending(**fields))


@asynccontextmanager
async def door(
    *,
    template: str = TEMPLATE,
    context_tokens: int = CONTEXT_TOKENS,
    engine: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Door]:
    scheduler = Scheduler()
    model = model_info(template=template, context_tokens=context_tokens, **(engine or {}))
    scheduler.serving = pb.Serving(ready=True, model=model)
    await scheduler.start()
    try:
        async with (
            gateway(scheduler, **settings) as served,
            httpx2.AsyncClient(base_url=f"http://{served.http}", timeout=WAIT_S, trust_env=False) as http,
        ):
            link = await scheduler.link()

            async def ready() -> bool:
                return served.front.ready

            await until(ready)
            yield Door(scheduler, link, served, http)
    finally:
        await scheduler.stop()


def events(answer: Answer) -> list[Any]:
    """What the events of a whole stream say, [DONE] as that string."""
    said = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in said]


def logprobs(tokens: Sequence[int], top: int = 0) -> common_pb2.Logprobs:
    """Made-up ones: each token is the likeliest, and those after it in the vocabulary follow."""
    made = []
    for token in tokens:
        likeliest = [token + i for i in range(top)]
        values = [-0.5 - i for i in range(top)]
        made.append({"logprob": -0.5, "top_tokens": likeliest, "top_logprobs": values})
    return common_pb2.Logprobs(tokens=made)
