"""`python -m tests.vllm.services PYTHON`: `laps-sd up` beside stock `vllm serve`, as whole services. PYTHON is that of
vLLM's environment; this runs in ours.

Each has the machine for itself, in turn, with the same model, as many requests in a batch, and its own defaults
otherwise. Both get the same prompts at the same times from `laps-sd loadtest --openai`. No assertions of tests live
here.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from laps_sd.loadtest.command import FELL_BEHIND
from tests.e2e.stack import running_stack
from tests.vllm import beside
from tests.waiting import until
from worker_service.pull import resolve

MODEL, READY_S, STOP_S = "smollm2-135m", 900.0, 60.0
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
FIGURES = {"mean latency": "mean_e2el_ms", "p99": "p99_e2el_ms", "first token, p99": "p99_ttft_ms"}


@asynccontextmanager
async def ours(folder: Path, slots: int, *flags: str) -> AsyncIterator[str]:
    """`laps-sd up` with one worker: the address of its HTTP."""
    async with running_stack(MODEL, folder, "--dtype", "auto", "--slots", str(slots), *flags, device=None) as stack:
        yield f"http://{stack.http}"
        await stack.stop()


@asynccontextmanager
async def vllm(python: Path, folder: Path, slots: int, *flags: str, cores: str = "auto") -> AsyncIterator[str]:
    """Stock `vllm serve`. `cores`: of the model; by itself vLLM leaves one to its front end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LAPS_SD"))}
    kept |= {"VLLM_CACHE_ROOT": str(folder), "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    kept |= {"VLLM_CPU_OMP_THREADS_BIND": cores}
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", resolve(MODEL), "--served-model-name", MODEL]
    command += ["--port", str(port), "--max-num-seqs", str(slots), "--max-model-len", "2048", *flags]
    with (folder / "vllm.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, env=kept, stdout=log, stderr=log, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"

    async def ready() -> bool:
        if process.returncode is not None:
            raise RuntimeError(f"vllm serve has ended: {(folder / 'vllm.log').read_text()[-3000:]}")
        try:
            async with httpx2.AsyncClient() as http:
                return (await http.get(f"{url}/health")).status_code == 200
        except httpx2.TransportError:
            return False

    try:
        await until(ready, READY_S)
        yield url
    finally:
        process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


async def load(url: str, folder: Path, *flags: str) -> dict[str, Any]:
    """The results that `laps-sd loadtest` writes."""
    file = folder / "results.json"
    command = ["-m", "laps_sd", "loadtest", "--openai", url, "--model", MODEL, "--json", file, *flags]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    told, _ = await process.communicate()
    if process.returncode not in (0, FELL_BEHIND):  # the latter is printed with the figures
        raise RuntimeError(told.decode())
    results: dict[str, Any] = json.loads(file.read_text())
    return results


async def compare(python: Path, folder: Path, asked: argparse.Namespace) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # the server ends, too
    sides = {
        "laps-sd up": lambda: ours(folder, asked.slots),
        "laps-sd up, fcfs": lambda: ours(folder, asked.slots, "--policy", "fcfs"),
        "vllm serve": lambda: vllm(python, folder, asked.slots),
        "vllm serve, all cores": lambda: vllm(python, folder, asked.slots, cores=f"0-{(os.cpu_count() or 1) - 1}"),
        "vllm serve, n-gram": lambda: vllm(
            python, folder, asked.slots, "--speculative-config", json.dumps(NGRAM)
        ),
    }  # fmt: skip
    told: dict[str, list[dict[str, Any]]] = {name: [] for name in asked.sides or sides}
    for repetition in range(asked.repetitions):
        flags = ["--rate", str(asked.rate), "--requests", str(asked.requests), "--seed", str(asked.seed + repetition)]
        for name in sorted(told, reverse=bool(repetition % 2)):
            async with sides[name]() as url:
                await load(url, folder, "--concurrency", str(asked.slots), "--requests", str(4 * asked.slots))
                results = await load(url, folder, *flags)
            told[name].append(results)
            print(
                f"{name:20} {results['completed']} of {asked.requests} answered",
                f"{results['total_output_tokens']} tokens",
                *(f"{what} {results[key] / 1000:.2f} s" for what, key in FIGURES.items()),
                f"kept up: {results['kept_up']}",
                sep=", ",
                flush=True,
            )
    first, *others = told
    for name in others:
        for what, key in FIGURES.items():
            ratios = [one[key] / other[key] for one, other in zip(told[first], told[name], strict=True)]
            print(f"{what}, {first} over {name}: {statistics.median(ratios):.2f} of {[round(r, 2) for r in ratios]}")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.services", description=__doc__)
    parser.add_argument("python", type=Path)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--rate", default="1", help="arrivals a second; inf: all at once")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sides", nargs="*", help="the first one over each of the others")
    asked = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        asyncio.run(compare(beside.made(asked.python, folder / "beside"), folder, asked))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
