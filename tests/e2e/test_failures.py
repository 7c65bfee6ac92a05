"""Processes die while answers stream: the client sees a pause, then the same text.

Most tests share a stack: what died in one of them is running again when the next one asks for its first answers.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import pytest_asyncio

from laps_sd.client import AsyncClient, Collector, Completion, UnknownRequest
from protos.health import is_serving
from tests.e2e.stack import Stack, running_stack
from tests.waiting import WAIT_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

READY_S = 120.0
GREEDY: dict[str, Any] = {"prompt": "Once upon a time there was a queue.", "max_tokens": 600, "ignore_eos": True}
SEEDED: dict[str, Any] = {**GREEDY, "prompt": "In the queue there were", "temperature": 1.0, "seed": 7}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One of each process, and a worker that runs all three requests at once."""
    async with running_stack(tiny_model, tmp_path_factory.mktemp("stack"), "--slots", "3") as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """With a scheduler that stands by, and two workers."""
    flags = ("--workers", "2", "--slots", "2", "--schedulers", "2")
    async with running_stack(tiny_model, tmp_path_factory.mktemp("pair"), *flags) as stack:
        yield stack


async def all_three(client: AsyncClient, started: asyncio.Event | None = None, **more: Any) -> list[Completion]:
    """Two greedy requests and a seeded one at once; `started` is set when each has some tokens."""
    waiting = 3

    async def one(params: dict[str, Any]) -> Completion:
        nonlocal waiting
        collector = Collector()
        async for chunk in client.generate(**params, **more):
            collector.add(chunk)
            if chunk.offset < 20 <= len(collector.token_ids) and started is not None:
                waiting -= 1
                if not waiting:
                    started.set()
        return collector.completion()

    return await asyncio.gather(one(GREEDY), one(SEEDED), one({**GREEDY, "prompt": "The quick brown fox"}))


async def texts_around(stack: Stack, disaster: Any, **more: Any) -> None:
    """The texts with a disaster in the middle equal those without."""
    async with AsyncClient(stack.grpc) as client:
        await client.ready(READY_S)
        expected = [answer.token_ids for answer in await all_three(client)]
        started = asyncio.Event()
        streams = asyncio.create_task(all_three(client, started, **more))
        async with asyncio.timeout(WAIT_S):
            await started.wait()
        assert not streams.done(), "too fast: nothing was running when the disaster struck"
        disaster()
        async with asyncio.timeout(READY_S):
            assert [answer.token_ids for answer in await streams] == expected


async def test_a_scheduler_killed_mid_stream_is_only_a_pause(shared: Stack) -> None:
    await texts_around(shared, shared.child("scheduler_service").kill)


async def test_a_scheduler_killed_under_an_http_stream_is_only_a_pause(shared: Stack) -> None:
    body = {"model": await model_of(shared), "prompt": GREEDY["prompt"], "max_tokens": 600, "ignore_eos": True}
    body |= {"temperature": 0, "stream": True}

    async def events(started: asyncio.Event) -> list[str]:
        texts: list[str] = []
        async with http(shared) as client, client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    texts += [choice["text"] for choice in event["choices"]]
                    started.set()
        assert line == "data: [DONE]" or not line
        return texts

    expected = "".join(await events(asyncio.Event()))
    started = asyncio.Event()
    stream = asyncio.create_task(events(started))
    async with asyncio.timeout(WAIT_S):
        await started.wait()
    assert not stream.done(), "too fast: it was over before the disaster struck"
    shared.child("scheduler_service").kill()
    async with asyncio.timeout(READY_S):
        assert "".join(await stream) == expected


def http(stack: Stack) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=f"http://{stack.http}", timeout=READY_S, trust_env=False)


async def model_of(stack: Stack) -> str:
    async with http(stack) as client:
        return str((await client.get("/v1/models")).json()["data"][0]["id"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_leader_of_a_pair_lost_mid_stream_is_only_a_pause(pair: Stack, number: signal.Signals) -> None:
    (leader,) = [child for child in pair.running("scheduler_service") if leads(child)]
    await texts_around(pair, lambda: leader.send_signal(number))
    with suppress(psutil.NoSuchProcess):
        leader.send_signal(signal.SIGCONT)


async def test_a_worker_killed_in_the_middle_of_a_prompt_costs_none_of_its_scores(pair: Stack) -> None:
    asked: dict[str, Any] = {"tokens": [7, 8, 9, 10] * 4000, "max_tokens": 0, "prompt_logprobs": 0}
    async with AsyncClient(pair.grpc) as client:
        await client.ready(READY_S)
        whole = await client.complete(**asked)
        task = asyncio.create_task(client.complete(**asked, request_id="scored"))

        async def begun() -> bool:
            with suppress(UnknownRequest):
                return (await client.status("scored")).state == "running"
            return False

        await until(begun)
        worker = (await client.status("scored")).worker_id
        assert not task.done(), "too fast: nothing was running when the disaster struck"
        pair.child("worker_service", having=worker).kill()
        async with asyncio.timeout(READY_S):
            moved = await task
    assert whole.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == 15_999
    assert moved.prompt_logprobs is not None
    assert [one.logprob for one in moved.prompt_logprobs] == pytest.approx(
        [one.logprob for one in whole.prompt_logprobs], abs=1e-3
    )


def leads(scheduler: psutil.Process) -> bool:
    words = scheduler.cmdline()
    return is_serving(f"http://127.0.0.1:{words[words.index('--port') + 1]}", "laps_sd.link.v1.GatewayLink")


async def test_a_worker_killed_mid_stream_changes_no_token(pair: Stack) -> None:
    await texts_around(pair, lambda: pair.child("worker_service").kill())


async def test_the_only_worker_killed_mid_stream_comes_back(shared: Stack) -> None:
    await texts_around(shared, shared.child("worker_service").kill)


async def test_redis_killed_mid_stream_is_only_a_pause(shared: Stack) -> None:
    (redis,) = [child for child in shared.children() if child.name() in ("valkey-server", "redis-server")]
    await texts_around(shared, redis.kill)


async def test_a_gateway_killed_mid_stream_is_only_a_pause_for_a_detached_client(shared: Stack) -> None:
    await texts_around(shared, shared.child("gateway").kill, on_disconnect="detach")


async def test_sigterm_drains_and_leaves_no_process_behind(pair: Stack) -> None:
    """(The last test of this stack.)"""
    async with AsyncClient(pair.grpc) as client:
        await client.ready(READY_S)
        started = asyncio.Event()
        answers = asyncio.create_task(all_three(client, started))
        async with asyncio.timeout(WAIT_S):
            await started.wait()
        children = pair.children()
        assert await pair.stop() == 0
        assert [len(answer.token_ids) for answer in await answers] == [600] * 3
    await all_gone(children)


async def test_children_die_with_their_parent(shared: Stack) -> None:
    """(The last test of this stack.)"""
    children = shared.children()
    shared.process.send_signal(signal.SIGKILL)
    await shared.process.wait()
    await all_gone(children)


async def all_gone(processes: list[psutil.Process]) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 10)
    assert not alive
