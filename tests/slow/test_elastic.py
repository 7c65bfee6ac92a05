"""Workers join, drain and die under load, on real processes: nothing fails, every text is what it was, and latency is
close to that of workers that were there from the start. Prints its figures."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest

from laps_sd.client import AsyncClient
from tests.e2e.stack import Stack, running_stack
from tests.tiny_model import make_tiny_model
from tests.waiting import until

pytestmark = pytest.mark.timeout(1800)

# As a device whose rounds take so long, however busy this machine is: four slots then end 0.8 requests a second.
PACE = {"draft_s": 0.0, "verify_s": 0.06, "verify_slope_s": 0.0, "prefill_token_s": 0.0001, "verify_token_s": 0.0}
TOKENS = 80
SLOTS = 4
FLAGS = ("--slots", str(SLOTS), "--drafter", "none", "--draft-len", "0", "--kv-tokens", "8192")
# Requests per second while one, three, two and one worker serve, and for how many seconds at least.
PHASES = ((1, 0.4, 5.0), (3, 1.5, 25.0), (2, 0.9, 20.0), (1, 0.4, 20.0))
MOST = 1.2  # times the mean latency of three workers from the start
MOVED_S = 1.0  # from a worker's attachment until it runs what waited


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), context_tokens=2048)


@pytest.fixture(autouse=True)
def pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAPS_SD_WORKER_PACE", json.dumps(PACE))


def asked(number: int) -> dict[str, Any]:
    """Greedy and seeded ones in turn."""
    sampling = {"temperature": float(number % 2), "seed": number}
    return {
        "prompt": f"In the queue there were {number} requests",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        **sampling,
    }


@dataclass
class Load:
    """What was sent when, in seconds since the first, and what came of it."""

    client: AsyncClient
    begun: float = field(default_factory=time.monotonic)
    sent_s: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    tasks: list[asyncio.Task[tuple[list[int], float]]] = field(default_factory=list)

    async def send(self, due_s: float) -> None:
        """One request, at that time."""
        await asyncio.sleep(max(0.0, self.begun + due_s - time.monotonic()))
        self.sent_s.append(time.monotonic() - self.begun)
        self.tasks.append(asyncio.create_task(self._ask(len(self.tasks))))

    async def _ask(self, number: int) -> tuple[list[int], float]:
        begun = time.monotonic()
        answer = await self.client.complete(**asked(number))
        return answer.token_ids, time.monotonic() - begun

    async def end(self) -> None:
        for tokens, latency_s in await asyncio.gather(*self.tasks):
            self.texts.append(tokens)
            self.latencies_s.append(latency_s)


async def run(*words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "laps_sd", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )


async def said(*words: str) -> str:
    """The output of a command, which must succeed."""
    process = await run(*words)
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


@asynccontextmanager
async def joined(stack: Stack, model: Path, name: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`laps-sd worker` as a process; it may still load."""
    where = ("--join", stack.scheduler, "--name", name, "--model", str(model), "--threads", "1")
    process = await run("worker", *where, "--dtype", "float32", "--device", "cpu", *FLAGS[:4], *FLAGS[6:])
    assert process.stdout is not None
    reading = asyncio.create_task(process.stdout.read())
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


async def serving(client: AsyncClient) -> set[str]:
    return {worker.worker_id for worker in (await client.stats()).workers if not worker.draining}


def count_is(client: AsyncClient, number: int) -> Callable[[], Any]:
    async def holds() -> bool:
        return len(await serving(client)) == number

    return holds


async def test_the_ramp_one_three_two_one_is_close_to_three_from_the_start(model: Path, tmp_path: Path) -> None:
    ramp = await ramped(model, tmp_path)
    steady = await replayed(model, tmp_path, ramp.sent_s)
    assert ramp.texts == steady.texts
    mean_s, base_s = fmean(ramp.latencies_s), fmean(steady.latencies_s)
    print(  # noqa: T201
        f"\n{len(ramp.texts)} requests, none failed, all texts equal: mean {mean_s:.2f} s with 1, 3, 2, 1 workers, "
        f"{base_s:.2f} s with three, {mean_s / base_s:.3f} times; p99 {quantile(ramp.latencies_s):.2f} and "
        f"{quantile(steady.latencies_s):.2f} s"
    )
    assert mean_s <= MOST * base_s


def quantile(values: Sequence[float], share: float = 0.99) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def ramped(model: Path, folder: Path) -> Load:
    random, due_s = Random(7), 0.0
    async with (
        running_stack(model, folder, *FLAGS) as stack,
        AsyncClient(stack.grpc) as client,
        joined(stack, model, "drains") as drains,
        joined(stack, model, "dies") as dies,
    ):
        load = Load(client)
        for number, (workers, rate, least_s) in enumerate(PHASES):
            since = due_s
            # The first phase lasts until the others have joined.
            while due_s < since + least_s or (not number and len(await serving(client)) < 3):
                due_s += random.expovariate(rate)
                await load.send(due_s)
            if workers == 3:
                assert "2 remaining" in await said("drain", "drains", "--server", stack.grpc)
            elif workers == 2:
                dies.send_signal(signal.SIGKILL)
                await until(count_is(client, 1))
        await load.end()
        assert await asyncio.wait_for(drains.wait(), 60) == 0
        assert await stack.stop() == 0
    return load


async def replayed(model: Path, folder: Path, sent_s: Sequence[float]) -> Load:
    async with running_stack(model, folder, *FLAGS, "--workers", "3") as stack, AsyncClient(stack.grpc) as client:
        await until(count_is(client, 3))
        load = Load(client)
        for due_s in sent_s:
            await load.send(due_s)
        await load.end()
        assert await stack.stop() == 0
    return load


async def test_what_waits_moves_to_a_worker_that_joins_within_a_second(model: Path, tmp_path: Path) -> None:
    async with running_stack(model, tmp_path, *FLAGS) as stack, AsyncClient(stack.grpc) as client:
        load = Load(client)
        many = {"max_tokens": 1200, "ignore_eos": True}
        answers = [asyncio.create_task(client.complete(f"long {number}", **many)) for number in range(2 * SLOTS)]
        await until(lambda: runs(client, SLOTS))
        async with joined(stack, model, "joins"):
            await until(lambda: is_loading(client, "joins"))
            loading_s = time.monotonic() - load.begun
            await until(count_is(client, 2))
            attached = time.monotonic()
            await until(lambda: runs(client, 2 * SLOTS))
            moved_s = time.monotonic() - attached
            ready_s = attached - load.begun
            print(  # noqa: T201
                f"\na worker that joins is known after {loading_s:.1f} s and serves after {ready_s:.1f} s; "
                f"what waited runs there {moved_s:.2f} s later"
            )
            assert moved_s <= MOVED_S
            for answer in answers:
                answer.cancel()
            await asyncio.gather(*answers, return_exceptions=True)


async def runs(client: AsyncClient, number: int) -> bool:
    return (await client.stats()).running == number


async def is_loading(client: AsyncClient, name: str) -> bool:
    return name in (await client.stats()).loading_workers


async def test_up_is_scaled_while_it_serves(model: Path, tmp_path: Path) -> None:
    async with running_stack(model, tmp_path, *FLAGS) as stack, AsyncClient(stack.grpc) as client:
        port = stack.grpc.rpartition(":")[2]
        answer = asyncio.create_task(client.complete(**asked(1)))
        assert "starting: worker-1" in await said("scale", "2", "--grpc-port", port)
        await until(count_is(client, 2), 120)
        assert "ending: worker-1" in await said("scale", "1", "--grpc-port", port)
        await until(count_is(client, 1))
        assert len((await answer).token_ids) == TOKENS
        assert await stack.stop() == 0


async def test_a_worker_of_another_model_is_told_so_and_leaves(model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)
    async with running_stack(model, tmp_path, *FLAGS) as stack:
        process = await run("worker", "--join", stack.scheduler, "--model", str(other), "--device", "cpu")
        output, _ = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 2
        assert "does not take this worker: model: other differs from what the other workers run" in output.decode()
