"""Requests preempted for memory on a real engine under the real scheduler, in one process."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from protos.link.v1 import worker_link_pb2 as pb
from protos.tls import Tls
from scheduler_service.store import MemoryStore
from tests.scheduler.live import ScriptedGateway, scheduler
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.types import Run, StepResult
from worker_service.link import Link
from worker_service.models import LoadedModel, load
from worker_service.runner import Runner
from worker_service.wire import of_model

DEADLINE_S = 60.0
PROMPTS = {f"r{i}": [10 + (i * 7 + j * 3) % 50 for j in range(40)] for i in range(3)}
TOKENS = 60


class Watched(Engine):
    """Notes whose KV comes back from the host's memory, and with how many tokens to be computed all the same."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._away: set[str] = set()
        self.returned: list[int] = []

    def offload(self, request_id: str) -> None:
        super().offload(request_id)
        self._away.update(held.request_id for held in self.held() if held.offloaded)

    def step(self, runs: Sequence[Run], slots: int) -> StepResult:
        result = super().step(runs, slots)
        self.returned += [row.prefilled for row in result.rows if row.request_id in self._away and not row.skipped]
        self._away -= {row.request_id for row in result.rows}
        return result


@asynccontextmanager
async def worker(target: str, model: LoadedModel, **memory: int) -> AsyncIterator[Watched]:
    """Attached to the scheduler at `target` soon."""
    engine = Watched(
        model.model,
        model.tokenizer,
        eos_ids=model.eos_ids,
        context_tokens=256,
        block_tokens=8,
        drafter=NgramDrafter(),
        **memory,
    )
    runner = Runner(engine, slots=1, threads=1)
    runner.start()

    async def on_attached(attached: bool) -> None:
        pass

    try:
        await asyncio.wrap_future(runner.warmed)
        link = Link(
            [target],
            tls=Tls(),
            runner=runner,
            hello=pb.Hello(
                worker_id="w",
                model=of_model(model, 256, engine.vocab_size),
                slots=1,
                blocks=engine.blocks,
                block_tokens=8,
                host_blocks=engine.host_blocks,
                max_draft=4,
            ),
            on_attached=on_attached,
        )
        running = asyncio.create_task(link.run())
        yield engine
        running.cancel()
        await asyncio.wait([running])
    finally:
        runner.stop()
        await asyncio.wait([asyncio.wrap_future(runner.ended)], timeout=DEADLINE_S)


async def outputs(folder: Path, **memory: int) -> tuple[dict[str, list[int]], Watched]:
    """Of all requests under a policy that goes to another as often as it can."""
    model = load(str(folder), "cpu", "float32")
    async with (
        asyncio.timeout(DEADLINE_S),
        scheduler(MemoryStore(), policy="las", predictor="none") as (_, target),
        worker(target, model, **memory) as engine,
    ):
        gateway = ScriptedGateway(target)
        await gateway.until(lambda: gateway.serving.ready)
        for name, prompt in PROMPTS.items():
            await gateway.submit(name, *prompt, max_tokens=TOKENS)
        await gateway.until(lambda: len(gateway.endings) == len(PROMPTS))
        await gateway.close()
        return gateway.tokens, engine


async def test_offloaded_kv_is_not_computed_again_and_the_output_is_what_it_would_have_been(tiny_model: Path) -> None:
    undisturbed, _ = await outputs(tiny_model, blocks=64)
    disturbed, engine = await outputs(tiny_model, blocks=16, host_blocks=48)  # for one of them; the rest for all
    assert disturbed == undisturbed
    assert len(engine.returned) > 3
    assert not any(engine.returned)
