"""A gateway with its page, a scripted scheduler behind it that counts what it is asked, and a browser's way of asking.
No assertions live here."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from gateway.app import Gateway
from protos.link.v1 import gateway_link_pb2 as pb
from protos.times import duration, timestamp
from protos.v1 import inference_pb2, status_pb2, types_pb2
from tests.gateway.harness import WAIT_S, Link, Scheduler, gateway, model_info
from tests.waiting import until

SAME_SITE = {"content-type": "application/json", "sec-fetch-site": "same-origin"}


class Watched(Scheduler):
    """Counts how often its figures are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.stats_asked = self.compared = 0
        self.told = status_pb2.StatsResponse(policy="gittins", queue_lengths=[1], read_time=timestamp(100.0), waiting=1)
        self.compares = inference_pb2.ComparePoliciesResponse(running_policy="gittins", least_requests=8)

    async def Stats(self, request: inference_pb2.StatsRequest, context: Any) -> status_pb2.StatsResponse:  # noqa: N802
        self.stats_asked += 1
        return self.told

    async def ComparePolicies(  # noqa: N802
        self, request: inference_pb2.ComparePoliciesRequest, context: Any
    ) -> inference_pb2.ComparePoliciesResponse:
        self.compared += 1
        return self.compares


@asynccontextmanager
async def page(model: Any = None, **settings: Any) -> AsyncIterator[tuple[Gateway, Watched, Link, httpx2.AsyncClient]]:
    scheduler = Watched()
    scheduler.serving = pb.Serving(ready=True, model=model or model_info(context_tokens=1024))
    await scheduler.start()
    try:
        async with gateway(scheduler, **settings) as served:
            link = await scheduler.link()

            async def ready() -> bool:
                return served.front.ready

            await until(ready)
            async with httpx2.AsyncClient(base_url=f"http://{served.http}", timeout=WAIT_S) as client:
                yield served, scheduler, link, client
    finally:
        await scheduler.stop()


@asynccontextmanager
async def watching(client: httpx2.AsyncClient, **headers: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The frames of a feed."""
    async with client.stream("GET", "/page/feed", headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        yield frames(answer)


async def frames(answer: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


async def next_of(events: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    return await asyncio.wait_for(anext(events), WAIT_S)


def waiting(id: str = "a", **more: Any) -> status_pb2.RequestStatus:
    """A request that another one passed."""
    fields: dict[str, Any] = {
        "request_id": id,
        "state": status_pb2.REQUEST_STATE_PAUSED,
        "queue_level": 1,
        "priority": types_pb2.PRIORITY_DEFAULT,
        "output_tokens": 7,
        "rounds": 3,
        "predicted_tokens": 40,
        "wait_reason": status_pb2.WAIT_REASON_CLAIM,
        "passed_by": ["b"],
        "recent_rounds": [types_pb2.Round(tokens=3, drafted=4, accepted=2), types_pb2.Round(tokens=1, drafted=4)],
        "submit_time": timestamp(90.0),
        "queue_time": duration(1.5),
        "estimated_end_time": timestamp(103.0),
    }
    return status_pb2.RequestStatus(**{**fields, **more})
