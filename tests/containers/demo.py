"""`python -m tests.containers.demo`: the twelve prompts of `laps-sd demo`, sent to the stack in containers and to the
same stack as bare processes in turn. Both are up all the time, and one is asked at a time."""

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from laps_sd.client import AsyncClient
from laps_sd.demo import PROMPTS
from tests.containers import engine as engines
from tests.containers.__main__ import FOLDER, PORTS, READY_S, bases, prepare
from tests.containers.engine import Engine
from tests.e2e.stack import running_stack

WORKERS = ("worker-0", "worker-1")
SLOTS, THREADS = 2, 1


async def twelve(client: AsyncClient, workers: Sequence[int]) -> tuple[float, float, list[str]]:
    """All prompts at once: mean latency in seconds, CPU seconds of the workers' processes, and the texts."""
    before = cpu_s(workers)

    async def one(prompt: str, max_tokens: int) -> tuple[float, str]:
        began = time.monotonic()
        answer = await client.complete(
            messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens, temperature=0.0
        )
        return time.monotonic() - began, answer.text

    answers = await asyncio.gather(*(one(*prompt) for prompt in PROMPTS))
    return statistics.mean(s for s, _ in answers), cpu_s(workers) - before, [text for _, text in answers]


def cpu_s(processes: Sequence[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in processes)


async def compare(engine: Engine, key: str, model: Path, rounds: int) -> int:
    flags = ("--workers", str(len(WORKERS)), "--slots", str(SLOTS), "--policy", "default")
    at = f"127.0.0.1:{PORTS['GRPC_PORT']}"
    async with contextlib.AsyncExitStack() as stack:
        boxed = await stack.enter_async_context(AsyncClient(at, ca=FOLDER / "ca.crt", api_key=key))
        await boxed.ready(READY_S)
        await asyncio.to_thread(engine.until_healthy, WORKERS, READY_S)
        processes = await stack.enter_async_context(running_stack(model, FOLDER, *flags))
        bare = await stack.enter_async_context(AsyncClient(processes.grpc))
        sides = {
            "containers": (boxed, [engine.pid(name) for name in WORKERS]),
            "processes": (bare, [child.pid for child in processes.running("worker_service")]),
        }
        told: dict[str, list[tuple[float, float, list[str]]]] = {name: [] for name in sides}
        for name, side in sides.items():
            await twelve(*side)  # to warm up
            print(f"{name}: warm")
        for at_round in range(rounds):
            for name in sorted(sides, reverse=bool(at_round % 2)):
                told[name].append(await twelve(*sides[name]))
                latency_s, worked_s, _ = told[name][-1]
                print(f"{name}: mean latency {latency_s:.2f} s, workers {worked_s:.1f} CPU s", flush=True)
    for what, i in {"mean latency": 0, "CPU of the workers": 1}.items():
        ratios = [box[i] / own[i] for box, own in zip(told["containers"], told["processes"], strict=True)]
        print(f"{what}, containers over processes: median {statistics.median(ratios):.2f} of {sorted(ratios)}")
    texts = [texts for runs in told.values() for *_, texts in runs]
    print(f"texts equal in all {len(texts)} runs: {all(each == texts[0] for each in texts)}")
    return 0


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.containers.demo", description=__doc__)
    parser.add_argument("model", type=Path, help="the directory that `laps-sd pull` prints")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(words)
    if (found := engines.find()) is None:
        print("skipped: neither Docker with its compose nor podman with podman-compose works here")
        return 0
    own = {
        "MODEL": "/model",
        "MODEL_DIR": str(given.model),
        "SLOTS": str(SLOTS),
        "THREADS": str(THREADS),
        "KV_TOKENS": "32768",
    }
    engine, key = prepare(*found, {**bases(), **own}, paced=False)
    try:
        engine.up()
        (FOLDER / "ca.crt").write_text(engine.execute("gateway", "cat", "/certs/ca.crt") + "\n")
        return asyncio.run(compare(engine, key, given.model, given.rounds))
    finally:
        engine.down()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
