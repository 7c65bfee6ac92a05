"""Devices that hang, and requests that kill their worker, on real processes: everybody else goes on, and gets the text
that it would have got."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from laps_sd.supervise import Child, Command
from protos.link.v1 import common_pb2
from protos.v1 import types_pb2
from scheduler_service.leader import Leader
from scheduler_service.store import MemoryStore
from tests.faults.faulty_worker import POISON
from tests.scheduler.live import ScriptedGateway, scheduler

pytestmark = [pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

TOKENS = 500
PROMPTS = {f"r{i}": [10 + (i * 7 + j * 3) % 50 for j in range(12)] for i in range(4)}
SEEDED = common_pb2.Sampling(temperature=1, top_p=1, seed=7)


@dataclass
class Service:
    """A scheduler in this process, and supervised workers of two slots on devices that fail on a word."""

    leader: Leader
    gateway: ScriptedGateway
    folder: Path
    lines: list[bytes] = field(default_factory=list)  # that workers and their supervisors print
    rounds: int = 0

    async def answers(self, disaster: str = "", poison: bool = False) -> dict[str, list[int]]:
        """Of all prompts; the disaster strikes when they are on their way, the poison comes before them."""
        self.rounds += 1
        names = {name: f"{name}-{self.rounds}" for name in PROMPTS}
        for name, prompt in PROMPTS.items():
            more: dict[str, Any] = {"sampling": SEEDED} if name == "r0" else {}
            await self.gateway.submit(names[name], *prompt, max_tokens=TOKENS, **more)
        if poison:
            await self.gateway.submit("poison", 10, *POISON, max_tokens=TOKENS)
        tokens, endings = self.gateway.tokens, self.gateway.endings
        if disaster:
            await self.gateway.until(lambda: any(len(tokens.get(id, ())) > 10 for id in names.values()))
            assert not endings.keys() & set(names.values()), "too fast: nothing was running when the disaster struck"
            (self.folder / disaster).touch()
        await self.gateway.until(lambda: endings.keys() >= set(names.values()))
        return {name: tokens[id] for name, id in names.items()}

    def printed(self, *words: bytes) -> bool:
        return any(all(word in line for word in words) for line in self.lines)

    async def all_attached(self) -> None:
        while len(self.leader.sessions) < 2:  # the gateway hears at least a beat a second
            await self.gateway.read()


@asynccontextmanager
async def running(model: Path, folder: Path, **settings: Any) -> AsyncIterator[Service]:
    async with scheduler(MemoryStore(), predictor="none", **settings) as (leader, target):
        service = Service(leader, ScriptedGateway(target), folder)
        program = [sys.executable, "-m", "tests.faults.faulty_worker", str(folder), "--scheduler", target]
        program += ["--model", str(model), "--dtype", "float32", "--device", "cpu", "--threads", "1", "--slots", "2"]
        program += ["--step-timeout-s", "0.6"]
        workers = [Child(Command(name, [*program, "--worker-id", name]), service.lines.append) for name in "uv"]
        async with asyncio.TaskGroup() as tasks:
            for worker in workers:
                tasks.create_task(worker.keep_running())
            try:
                async with asyncio.timeout(170):
                    await service.all_attached()
                yield service
            finally:
                await service.gateway.close()
                await asyncio.gather(*(worker.stop() for worker in workers))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    async with running(tiny_model, tmp_path_factory.mktemp("faults")) as made:
        yield made


async def test_a_hung_pass_ends_its_worker_and_changes_no_token(service: Service) -> None:
    expected = await service.answers()
    assert await service.answers("hang") == expected
    assert service.printed(b'"hung"', b'"after_s"')
    assert service.printed(b'"child_died"', b'"code": 1')
    assert await service.answers("seize") == expected


async def test_a_poisonous_request_ends_alone_and_its_neighbours_get_their_text(service: Service) -> None:
    expected = await service.answers()
    assert await service.answers(poison=True) == expected
    await service.gateway.until(lambda: "poison" in service.gateway.endings)
    ending = service.gateway.endings["poison"]
    assert ending.finish_reason == types_pb2.FINISH_REASON_ERROR
    assert "3 workers died" in ending.message
    assert not service.gateway.tokens["poison"]
