"""Every process of a stack is told to end, one after the other, under load: each answer is whole, and what it was."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from laps_sd.client import AsyncClient
from protos.health import is_serving
from tests.e2e.stack import Stack, running_stack
from tests.e2e.test_failures import leads
from tests.waiting import until

pytestmark = pytest.mark.timeout(900)

PROMPTS = ("Once upon a time", "The quick brown fox", "In the queue", "A short request", "Speculative decoding")
WORDS = {"max_tokens": 400, "ignore_eos": True, "on_disconnect": "detach"}


def asked(number: int) -> dict[str, Any]:
    """Greedy and seeded ones in turn."""
    return {"prompt": PROMPTS[number], "temperature": float(number % 2), "seed": number, **WORDS}


async def test_a_rolling_restart_under_load_loses_nothing(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--workers", "2", "--schedulers", "2", "--slots", "3", "--drain-s", "2")
    async with running_stack(tiny_model, tmp_path, *flags) as stack, AsyncClient(stack.grpc) as client:
        expected = [(await client.complete(**asked(number))).token_ids for number in range(len(PROMPTS))]
        over, answers = asyncio.Event(), [0] * len(PROMPTS)

        async def load(number: int) -> None:
            while not over.is_set():
                assert (await client.complete(**asked(number))).token_ids == expected[number]
                answers[number] += 1

        async with asyncio.TaskGroup() as tasks:
            for number in range(len(PROMPTS)):
                tasks.create_task(load(number))
            for number in range(2):
                await restart(stack, stack.child("worker_service", having=f"worker-{number}"), serves_again(client))
            (leader,) = [child for child in stack.running("scheduler_service") if leads(child)]
            (standby,) = [child for child in stack.running("scheduler_service") if child != leader]
            await restart(stack, standby, alive(standby))
            await restart(stack, leader, alive(leader))
            await restart(stack, stack.child("gateway"), serves_again(client))
            done = list(answers)
            await until(lambda: more(answers, done), timeout_s=120)
            over.set()
        assert await stack.stop() == 0
    assert b"worker_hung" not in (log := (tmp_path / "up.log").read_bytes())
    assert log.count(b'"child_died"') == log.count(b'"code": 0') == 5


async def restart(stack: Stack, child: psutil.Process, back: Any) -> None:
    """SIGTERM, and wait for its successor."""
    words = child.cmdline()
    child.send_signal(signal.SIGTERM)

    async def succeeded() -> bool:
        others = [other for other in stack.children() if other.pid != child.pid]
        return any(words_of(other) == words for other in others) and await back()

    await until(succeeded, timeout_s=120)


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; none of one that is just ending."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def serves_again(client: AsyncClient) -> Any:
    async def both() -> bool:
        try:
            return len((await client.stats()).workers) == 2
        except Exception:  # no gateway, or no leader, just now
            return False

    return both


def alive(scheduler: psutil.Process) -> Any:
    words = scheduler.cmdline()

    async def answers() -> bool:
        return await asyncio.to_thread(is_serving, f"http://127.0.0.1:{words[words.index('--port') + 1]}", "")

    return answers


async def more(answers: list[int], than: list[int]) -> bool:
    return all(now > before for now, before in zip(answers, than, strict=True))
