"""Gateways without clients that speak like real ones and cost next to nothing. Nothing is measured here."""

import asyncio
import itertools
import math
from collections.abc import Sequence
from random import Random
from typing import Any

from laps_sd.schedbench.workers import CONTEXT_TOKENS, VOCABULARY
from protos import version
from protos.link.v1 import common_pb2, gateway_link_pb2
from protos.link.v1.gateway_link_pb2_grpc import GatewayLinkStub
from protos.serving import channel
from protos.v1 import types_pb2

PROMPT_TOKENS = 200
MEAN_TOKENS = 120.0  # of an answer; log-normal, as answers are
SIGMA = 0.8  # of its logarithm
UNACKNOWLEDGED = 256  # submissions on their way, of all gateways together
FILL_S = 30.0  # for their acknowledgement


class Gateway:
    """Keeps a number of requests alive: one that ends is followed by another.

    `rows` counts the deltas that came with tokens: each is one acknowledged row of a worker's report. `tokens` counts
    their tokens, `ended` the requests that ended. It is gateway `number` of `gateways`, and draws each request's
    tenant among `tenants`.
    """

    def __init__(self, target: str, seed: int, number: int = 0, tenants: int = 1, gateways: int = 1) -> None:
        self.live = self.ended = self.rows = self.tokens = 0
        self._goal = 0
        self._draws = 1
        self._target, self._random = target, Random(f"{seed} {number}" if number else seed)
        self._number, self._tenants = number, tenants
        self._numbers = itertools.count()
        self._missing = asyncio.Event()
        self._full = asyncio.Event()
        self._unacknowledged = max(1, UNACKNOWLEDGED // gateways)
        self._window = asyncio.Semaphore(self._unacknowledged)

    async def fill(self, live: int, draws: int = 1) -> None:
        """Returns when so many requests are alive, all of them durable. Each is the longest of `draws` drawn ones;
        those that follow them are drawn once."""
        self._goal, self._draws = live, draws
        self._full.clear()
        self._missing.set()
        await self._full.wait()
        self._draws = 1
        async with asyncio.timeout(FILL_S):
            for _ in range(self._unacknowledged):
                await self._window.acquire()
        for _ in range(self._unacknowledged):
            self._window.release()

    async def run(self) -> None:
        """Until cancelled. Raises ConnectionError."""
        async with channel(self._target) as link:
            call: Any = GatewayLinkStub(link).Link(metadata=version.METADATA)
            await asyncio.gather(self._read(call), self._submit(call))

    async def _read(self, call: Any) -> None:
        while True:
            message = await call.read()
            if not isinstance(message, gateway_link_pb2.ToGateway):
                raise ConnectionError(f"the scheduler hung up: {await call.code()}, {await call.details()}")
            for refusal in message.refusals:
                raise ConnectionError(f"a request was refused: {refusal.message}")
            for _ in message.accepted:
                self._window.release()
            for delta in message.deltas:
                self._delta(delta)

    def _delta(self, delta: gateway_link_pb2.Delta) -> None:
        if new := len(delta.tokens):
            self.rows += 1
            self.tokens += new
        if delta.HasField("ending"):
            self.ended += 1
            self.live -= 1
            self._missing.set()

    async def _submit(self, call: Any) -> None:
        while True:
            await self._missing.wait()
            self._missing.clear()
            while self.live < self._goal:
                await self._window.acquire()
                self.live += 1
                await call.write(gateway_link_pb2.FromGateway(submit=self._request()))
            self._full.set()

    def _request(self) -> gateway_link_pb2.Submit:
        mean = math.log(MEAN_TOKENS) - SIGMA**2 / 2
        tokens = round(max(self._random.lognormvariate(mean, SIGMA) for _ in range(self._draws)))
        return gateway_link_pb2.Submit(
            request_id=f"request-{self._number}-{next(self._numbers)}",
            prompt=[self._random.randrange(VOCABULARY)] * PROMPT_TOKENS,
            limits=common_pb2.Limits(max_tokens=min(max(tokens, 1), CONTEXT_TOKENS - PROMPT_TOKENS)),
            sampling=common_pb2.Sampling(seed=self._random.getrandbits(63)),
            on_disconnect=types_pb2.ON_DISCONNECT_DETACH,
            tenant=f"tenant-{self._random.randrange(self._tenants)}" if self._tenants > 1 else "",
        )


async def fill(gateways: Sequence[Gateway], live: int, draws: int = 1) -> None:
    """`Gateway.fill`, with the requests shared out among the gateways."""
    shares = [(live + number) // len(gateways) for number in range(len(gateways))]
    await asyncio.gather(*(gateway.fill(share, draws) for gateway, share in zip(gateways, shares, strict=True)))
