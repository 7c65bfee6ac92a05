"""Knocks at the doors of a real stack, and looks whether everybody there is still well. No command line."""

import asyncio
import itertools
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import grpc

from laps_sd.client import AsyncClient
from laps_sd.stack import Stack
from protos import version
from protos.errors import RequestError, UnknownRequest
from protos.link.v1 import gateway_link_pb2
from protos.link.v1.gateway_link_pb2_grpc import GatewayLinkStub
from protos.serving import channel
from tests.fuzz.doors import Broken, Door
from tests.fuzz.inputs import mutated

KNOCKERS = 16
CANARY = "A short request overtakes a long one"
CALM_S = 60.0
COMPLAINTS = (b'"event": "unexpected"', b'"event": "child_died"', b'"exception"')
GRPC_REMARK = re.compile(rb"[IW]\d{4} ")
# What grpc's client makes of a stream that the server ended, and why, while it still wrote.
WRITE_AFTER_END = "Internal error from Core"


class Harm(Exception):
    """An input did what no input may; the message says which batch repeats it."""


@dataclass
class Watch:
    """What the stack's processes say and do while inputs come in."""

    stack: Stack
    complaints: list[str] = field(default_factory=list)
    _canary: str = ""

    async def calm(self) -> None:
        """Ends what inputs have begun. Raises Harm if somebody died, complained, or answers otherwise than before."""
        async with AsyncClient(self.stack.grpc, max_retries=0) as client:
            async with asyncio.timeout(CALM_S):
                while requests := (await client.list_requests(256)).requests:
                    for request in requests:
                        with suppress(UnknownRequest):
                            await client.cancel(request.request_id)
            try:
                answer = await client.complete(CANARY, max_tokens=24, timeout_s=CALM_S)
            except RequestError as error:
                raise Harm(f"the canary died: {error!r}; {self.complaints}") from error
        self._canary = self._canary or answer.text
        if answer.text != self._canary or self.complaints:
            raise Harm(f"{self.complaints or answer.text}")

    async def serving(self, scheduler: str) -> gateway_link_pb2.Serving:
        """What it greets a gateway with: the model."""
        async with channel(scheduler) as link:
            return (await GatewayLinkStub(link).Link(timeout=CALM_S, metadata=version.METADATA).read()).serving

    @staticmethod
    def line(complaints: list[str], line: bytes) -> None:
        """Of a process: what is no log line (a traceback), an exception, a death. A refusal that is logged is none."""
        said = line.startswith(b"{") or GRPC_REMARK.match(line)
        if not said or any(word in line for word in COMPLAINTS):
            complaints.append(line.decode(errors="replace").rstrip())


async def batch(door: Door, target: str, seed: str, inputs: int) -> Counter[str]:
    """So many inputs at this door; how many ended in which status. Raises a group of Harm."""
    seen = Counter[str]()
    numbers = itertools.count()
    async with channel(target) as link:

        async def knocker() -> None:
            while seen.total() < inputs:
                status, count = await knock(door, link, f"{seed}/{next(numbers)}")
                seen[status.name] += count

        async with asyncio.TaskGroup() as tasks:
            for _ in range(KNOCKERS):
                tasks.create_task(knocker())
    return seen


async def knock(door: Door, link: grpc.aio.Channel, seed: str) -> tuple[grpc.StatusCode, int]:
    """One call, as `seed` has it: its status, and how many inputs that were. Raises Harm."""
    random = Random(seed)
    raw = [mutated(random, random.choice(door.seeds)) for _ in range(random.randint(1, door.most))]
    if door.first is not None:
        raw.insert(0, door.first.SerializeToString() if random.random() < 0.7 else mutated(random, door.first))
    try:
        call = await door.send(link, door.method, raw, random)
    except Broken as error:
        raise Harm(f"{door.method}, input {seed}: {error}") from error
    status = await call.code()
    if await call.details() == WRITE_AFTER_END:
        return grpc.StatusCode.ABORTED, len(raw)
    if status not in door.statuses:
        raise Harm(f"{door.method}, input {seed}: {status.name}, {await call.details()}")
    return status, len(raw)
