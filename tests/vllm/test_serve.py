"""`vllm serve` as docs/how-to/vllm.md has it, on the real model: a server that watches, then one that orders. Each
answers a load, and what clients may ask beside; shows its figures in /metrics, and ends when it is told to. It runs in
our environment, beside vLLM's."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

if "LAPS_SD_TESTS_VLLM_PYTHON" not in os.environ:
    pytest.skip("no interpreter with vLLM is named: make test-vllm", allow_module_level=True)

import httpx2

from tests.vllm import beside
from tests.waiting import until
from worker_service.pull import resolve

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(14_400)]

SLOTS, READY_S, ANSWER_S = 2, 3000.0, 1800.0  # of a machine that has much else to do
LOAD = [{"prompt": f"Tell me about number {n}.", "output_tokens": 6 if n % 3 else 90} for n in range(12)]
PROMPTS = [(f"Repeat: {word}, {word}, {word},", most) for word, most in zip("abcd", (40, 24, 8, 8), strict=True)]
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
WRONG = {"laps_sd_tokens": "many", "laps_sd_class": ["batch"], "laps_sd_tenant": 7}
ODD: list[dict[str, Any]] = [
    {"prompt": "One, two, three, four, five,", "max_tokens": 40, "stop": ["nine"]},
    {"prompt": "The colours of the flag are", "max_tokens": 20, "logprobs": 2},
    {"prompt": "My favourite colour as JSON:", "max_tokens": 40, "structured_outputs": {"json": COLOUR}},
    {"prompt": "Go on: a, b, c,", "max_tokens": 16, "vllm_xargs": WRONG},
    {"prompt": "Go on: 1, 2, 3,", "max_tokens": 16, "priority": -5},
    {"prompt": "Go on: 3, 2, 1,", "max_tokens": 16, "priority": 7, "vllm_xargs": {"laps_sd_tokens": 16}},
]
SEVERAL = {"prompt": "Name a fruit:", "max_tokens": 12, "n": 3, "temperature": 0.8, "seed": 1}
FIGURES = ("laps_sd_latency_mean_seconds", "laps_sd_latency_p99_seconds", "laps_sd_longest_pause_seconds")


@dataclass
class Server:
    url: str
    process: asyncio.subprocess.Process
    seen: list[dict[str, float]] = field(default_factory=list)

    async def metrics(self) -> dict[str, float]:
        """By name, the sum over labels; those with a policy by name and policy."""
        async with httpx2.AsyncClient(timeout=60) as http:
            text = (await http.get(f"{self.url}/metrics")).text
        told: dict[str, float] = {}
        for name, labels, value in re.findall(r"^(\w[\w:]*)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE):
            policy = re.search(r'policy="([^"]*)"', labels)
            key = f"{name} {policy[1]}" if policy else name
            told[key] = told.get(key, 0.0) + float(value)
        return told

    async def having(self, finished: int) -> dict[str, float]:
        """Once so many have finished, and some are compared."""
        told: dict[str, float] = {}

        async def counted() -> bool:
            told.update(await self.metrics())
            return bool(told.get("laps_sd_finished_requests") == finished and told["laps_sd_compared_requests"])

        await until(counted, ANSWER_S)
        return told

    async def watch(self) -> None:
        """Look at /metrics again and again."""
        while True:
            self.seen.append(await self.metrics())

    async def load(self, folder: Path) -> dict[str, Any]:
        """`laps-sd loadtest --openai`: twelve at once."""
        (folder / "load.jsonl").write_text("\n".join(map(json.dumps, LOAD)))
        flags = ["--openai", self.url, "--model", "m", "--workload", str(folder / "load.jsonl"), "--rate", "inf"]
        command = [sys.executable, "-m", "laps_sd", "loadtest", *flags, "--json", str(folder / "load.json")]
        driver = await asyncio.create_subprocess_exec(*command)
        await driver.wait()
        told: dict[str, Any] = json.loads((folder / "load.json").read_text())
        return told

    async def choices(self, **body: Any) -> list[dict[str, Any]]:
        async with httpx2.AsyncClient(timeout=ANSWER_S) as http:
            asked = {"model": "m", "temperature": 0.0, "ignore_eos": "structured_outputs" not in body} | body
            answer = await http.post(f"{self.url}/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        choices: list[dict[str, Any]] = answer.json()["choices"]
        return choices

    async def answer(self, **body: Any) -> str:
        return str((await self.choices(**body))[0]["text"])

    async def odd(self) -> list[str]:
        """The answers to ODD, all at once, beside requests whose clients leave while they run and while they wait.
        SEVERAL comes after them: with n-gram drafts on CPUs vLLM 0.32, in its own order too, gives greedy requests
        wrong tokens beside sampled ones."""
        leaving = [asyncio.create_task(self.answer(prompt=f"Count from {n}:", max_tokens=400)) for n in range(4)]

        async def under_way() -> bool:
            told = await self.metrics()
            return told["vllm:num_requests_running"] + told["vllm:num_requests_waiting"] == len(leaving)

        await until(under_way, ANSWER_S)
        asked = [asyncio.create_task(self.choices(**body)) for body in ODD]
        for task in leaving:
            task.cancel()
        answers = await asyncio.gather(*asked)
        several = await self.choices(**SEVERAL)
        assert len(several) == SEVERAL["n"]
        told = [choice["text"] for (choice,) in answers]
        assert "nine" not in told[0]
        assert json.loads(told[2])["colour"] in ("red", "blue")
        logprobs = answers[1][0]["logprobs"]
        assert "".join(logprobs["tokens"]) == told[1]
        assert len(logprobs["token_logprobs"]) == ODD[1]["max_tokens"]

        async def at_rest() -> bool:
            told = await self.metrics()
            return told["vllm:num_requests_running"] == told["vllm:num_requests_waiting"] == 0

        await until(at_rest, ANSWER_S)
        assert (await self.metrics())["laps_sd_fallbacks_total"] == 0
        return told


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return beside.made(Path(os.environ["LAPS_SD_TESTS_VLLM_PYTHON"]), tmp_path_factory.mktemp("beside"))


@asynccontextmanager
async def serving(python: Path, folder: Path, **asked: Any) -> AsyncIterator[Server]:
    """`vllm serve` with these settings of ours, once it answers. Its log: folder/serve.log."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ours = json.dumps({"laps_sd": {"compare_every_s": 1, **asked}})
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4})
    flags = ["--scheduler-cls", "laps_sd_vllm.LapsSdScheduler", "--additional-config", ours, "--port", str(port)]
    flags += ["--served-model-name", "m", "--max-num-seqs", str(SLOTS), "--max-model-len", "512", "--dtype", "float32"]
    flags += ["--enforce-eager", "--speculative-config", drafts]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LAPS_SD"))}
    kept |= {"VLLM_CACHE_ROOT": str(folder), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (folder / "serve.log").open("wb") as log:
        command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(resolve("smollm2-135m")), *flags]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, env=kept, stdout=log, stderr=log, start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", process)

    async def ready() -> bool:
        assert process.returncode is None, (folder / "serve.log").read_text()[-3000:]
        try:
            async with httpx2.AsyncClient() as http:
                return (await http.get(f"{server.url}/health")).status_code == 200
        except httpx2.TransportError:
            return False

    try:
        await until(ready, READY_S)
        yield server
        process.terminate()
        assert await process.wait() in (0, -signal.SIGTERM)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def test_it_watches_then_orders_and_metrics_tell(python: Path, tmp_path: Path) -> None:
    texts: dict[str, list[str]] = {}
    for mode in ("observe", "order"):
        (folder := tmp_path / mode).mkdir()
        async with serving(python, folder, mode=mode) as server:
            watching = asyncio.create_task(server.watch())
            told = await server.load(folder)
            assert (told["completed"], told["failed"]) == (len(LOAD), 0)

            first = await server.having(len(LOAD))
            asked = [server.answer(prompt=prompt, max_tokens=most) for prompt, most in PROMPTS]
            texts[mode] = await asyncio.gather(*asked)

            last = await server.having(len(LOAD) + len(PROMPTS))
            watching.cancel()
            assert not watching.done() or watching.cancelled()
            _ours(mode, first, last)
            _vllms(server.seen, last)
            texts[mode] += await server.odd()
        assert "LAPS-SD: mean, p99 and longest pause in seconds" in (folder / "serve.log").read_text()
        assert len(list((folder / "laps-sd").glob("*.learned"))) == 1
    assert texts["order"] == texts["observe"]


def _ours(mode: str, first: dict[str, float], last: dict[str, float]) -> None:
    """What LAPS-SD tells after the first load, and after more."""
    assert first["laps_sd_finished_requests"] == len(LOAD)
    for name in FIGURES:
        assert {f"{name} {policy}" for policy in ("measured", "fcfs", "gittins", "oracle")} <= set(first)
    assert first["laps_sd_latency_mean_seconds measured"] > 0
    assert last["laps_sd_ordering"] == (mode == "order")
    assert (last["laps_sd_plans_total"] > first["laps_sd_plans_total"]) == (mode == "order")
    assert last["laps_sd_fallbacks_total"] == 0


def _vllms(seen: list[dict[str, float]], last: dict[str, float]) -> None:
    """What vLLM tells: those that run are at most as many as may run, all others wait."""
    running = [each["vllm:num_requests_running"] for each in seen]
    waiting = [each["vllm:num_requests_waiting"] for each in seen]
    assert 0 < max(running) <= SLOTS
    assert max(waiting) > SLOTS
    assert max(one + other for one, other in zip(running, waiting, strict=True)) <= len(LOAD)
    assert last["vllm:request_success_total"] == len(LOAD) + len(PROMPTS)
    assert (last["vllm:num_requests_running"], last["vllm:num_requests_waiting"]) == (0, 0)
