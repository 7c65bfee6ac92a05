"""vLLM's own order beside ours on the real model: the same prompts at the same times, in turn, each in an engine of its
own. It needs an idle machine, for some ten hours; with `--quick` for about 75 minutes; `--smoke` only shows that it
runs. No assertions live here.

Two ways to queue: few slots, or little KV memory. Both orders run at the `max_num_seqs` at which vLLM's own makes most
tokens a second in that cell, and a load is a share of these. `python -m tests.vllm.compare --json FILE`.
"""

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass, field
from math import fsum
from pathlib import Path
from typing import Any

from scheduler_service.sim.results import interval_95, percentile
from tests.vllm.drive import MODEL, add, make_core, run_all, step

SLOTS = (2, 4, 8, 16, 32)
BLOCKS = (4, 6, 8)  # times the blocks of the longest request
TRIED = (*SLOTS, 64)  # max_num_seqs
LOADS = (0.7, 0.9, 1.1)
QUICK = ("KV of 4 long requests", "2 slots", "32 slots")  # where memory is short, slots are few, slots are plenty
QUICK_S = 960.0  # of the runs of one of them
BATCHES = (1, 8, 16)  # of the comparison of a plug-in that only watches
BLOCK, CONTEXT, MOST = 32, 1024, 512  # tokens
ORDER = {"mode": "order", "learned": False, "compare": False}
WATCH = {"mode": "observe", "learned": False, "compare": False}
PLUGIN = "laps_sd_vllm.LapsSdScheduler"


@dataclass(frozen=True)
class Cell:
    """`seqs`: vLLM's --max-num-seqs. `blocks`: of KV; None: as many as are needed."""

    name: str
    seqs: int
    blocks: int | None = None

    def engine(self, asked: dict[str, Any] | None) -> Any:
        """The plug-in, or without settings vLLM's own scheduler."""
        speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
        return make_core(
            PLUGIN if asked else None, additional_config={"laps_sd": asked} if asked else {}, dtype="bfloat16",
            max_num_seqs=self.seqs, max_model_len=CONTEXT, block_size=BLOCK, speculative_config=speculation,
            blocks=self.blocks or (CONTEXT // BLOCK) * 2 * self.seqs + 1, max_num_batched_tokens=2048,
        )  # fmt: skip


@dataclass
class Served:
    arrival: float
    got: list[float] = field(default_factory=list)  # when tokens came
    tokens: int = 0


def prompts(count: int, seed: int) -> list[list[int]]:
    """Questions about paragraphs, in the model's own form of a chat; they end where the model ends them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    paragraphs = (Path(__file__).parents[1] / "paragraphs.txt").read_text().split("\n\n")
    asks = ("Summarise this in one sentence:", "Explain this to a child:", "Name three words of this:", "Go on:")
    rng, ids = random.Random(seed), []
    for _ in range(count):
        words = f"{rng.choice(asks)} {rng.choice(paragraphs)[: rng.choice((80, 200, 400))]}"
        turn = [{"role": "user", "content": words}]
        ids.append(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False))
    return ids


def serve(core: Any, asked: list[list[int]], at: list[float], number: int, most: int) -> dict[str, float]:
    """Figures in seconds: each prompt comes so long after the beginning."""
    served: dict[str, Served] = {}
    begun, coming = time.time(), list(zip(at, asked, strict=True))[::-1]
    while coming or core.scheduler.has_requests() or core.batch_queue:
        now = time.time()
        while coming and begun + coming[-1][0] <= now:
            after, prompt = coming.pop()
            id = f"c{number}-{len(coming)}"
            served[id] = Served(begun + after)
            add(core, id, prompt, most, arrival=begun + after, ignore_eos=False, stop_token_ids=[2])
        if not core.scheduler.has_requests() and not core.batch_queue:
            time.sleep(max(0.0, begun + coming[-1][0] - time.time()))
            continue
        for id, (tokens, _) in step(core).items():
            if tokens:
                served[id].got.append(time.time())
                served[id].tokens += len(tokens)
    core.scheduler.reset_prefix_cache()
    return figures(list(served.values()), begun)


def figures(served: list[Served], begun: float) -> dict[str, float]:
    ended = [each for each in served if each.got]
    latencies = sorted(each.got[-1] - each.arrival for each in ended)
    firsts = sorted(each.got[0] - each.arrival for each in ended)
    pauses = sorted(max((b - a for a, b in zip(each.got, each.got[1:], strict=False)), default=0.0) for each in ended)
    last = max(each.got[-1] for each in ended)
    return {
        "mean_s": fsum(latencies) / len(latencies),
        "p99_s": percentile(latencies, 0.99),
        "p99_first_token_s": percentile(firsts, 0.99),
        "p99_longest_pause_s": percentile(pauses, 0.99),
        "tokens_per_s": sum(each.tokens for each in ended) / (last - begun),
        "tokens": sum(each.tokens for each in ended),
    }


def cells() -> list[Cell]:
    longest = -(-CONTEXT // BLOCK)
    few = [Cell(f"{slots} slots", slots) for slots in SLOTS]
    return [*few, *(Cell(f"KV of {times} long requests", 64, times * longest + 1) for times in BLOCKS)]


@dataclass(frozen=True)
class Size:
    """`requests` of a run; None: as many as fill QUICK_S. `most`: output tokens."""

    loads: tuple[float, ...] = LOADS
    requests: int | None = 400
    repetitions: int = 3
    tried: tuple[int, ...] = TRIED
    most: int = MOST


def search(core: Any, cell: Cell, size: Size, write: Any) -> int:
    """The max_num_seqs at which vLLM's own order makes most tokens a second; the engine keeps it."""
    rates = {}
    for seqs in [each for each in size.tried if each <= cell.seqs]:
        core.scheduler.max_num_running_reqs = core.scheduler.max_num_active_reqs = seqs
        asked = prompts(2 * seqs + 4, 1)
        rates[seqs] = serve(core, asked, [0.0] * len(asked), 5000 + seqs, size.most)["tokens_per_s"]
    best = max(rates, key=rates.__getitem__)
    core.scheduler.max_num_running_reqs = core.scheduler.max_num_active_reqs = best
    write({"cell": cell.name, "what": "tokens_per_s by max_num_seqs", "stock": rates, "best": best})
    return best


def one_cell(cell: Cell, size: Size, write: Any) -> None:
    stock = cell.engine(None)
    best = search(stock, cell, size, write)
    kinds = {"stock": stock, "LAPS-SD": cell.engine({**ORDER, "slots": best})}
    burst = prompts(3 * best + 4, 1)
    tried: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for turn in range(2):
        for kind in list(kinds)[:: 1 if turn else -1]:
            tried[kind].append(serve(kinds[kind], burst, [0.0] * len(burst), 10 + turn, size.most))
    saturated = {kind: max(each["tokens_per_s"] for each in runs) for kind, runs in tried.items()}
    mean_tokens = tried["stock"][0]["tokens"] / len(burst)
    write({"cell": cell.name, "what": "saturated tokens_per_s", **saturated, "mean_tokens": mean_tokens})
    for load in size.loads:
        told: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        rate = load * saturated["stock"] / mean_tokens
        requests = size.requests or max(8, int(rate * QUICK_S / (2 * size.repetitions)))
        for repetition in range(size.repetitions):
            rng = random.Random(100 + repetition)
            at, now = [], 0.0
            for _ in range(requests):
                now += rng.expovariate(rate)
                at.append(now)
            texts = prompts(requests, repetition)
            for kind in list(kinds)[:: 1 if repetition % 2 else -1]:
                told[kind].append(serve(kinds[kind], texts, at, 1000 + repetition, size.most))
        for figure in ("mean_s", "p99_s", "p99_first_token_s", "p99_longest_pause_s", "tokens_per_s"):
            pairs = zip(told["LAPS-SD"], told["stock"], strict=True)
            ratio, half = interval_95([ours[figure] / max(1e-9, theirs[figure]) for ours, theirs in pairs])
            line = {kind: interval_95([each[figure] for each in runs])[0] for kind, runs in told.items()}
            about = {"cell": cell.name, "load": load, "requests": requests, "what": figure}
            write({**about, **line, "ratio": ratio, "half": half})
    for core in kinds.values():
        core.shutdown()


def watching(batches: tuple[int, ...], size: Size, write: Any) -> None:
    """Tokens a second of a plug-in that only watches, beside vLLM without it."""
    cell = Cell("watching", max(batches))
    kinds = {"stock": cell.engine(None), "observe": cell.engine(WATCH)}
    for batch in batches:
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        asked = prompts(batch, 7)
        for repetition in range(size.repetitions + 1):
            for kind in list(kinds)[:: 1 if repetition % 2 else -1]:
                core, begun = kinds[kind], time.perf_counter()
                for number, prompt in enumerate(asked):
                    add(core, f"w{batch}-{repetition}-{number}", prompt, min(64, size.most))
                tokens = sum(map(len, run_all(core).values()))
                core.scheduler.reset_prefix_cache()
                if repetition:  # the first one warms up
                    rates[kind].append(tokens / (time.perf_counter() - begun))
        pairs = zip(rates["observe"], rates["stock"], strict=True)
        ratio, half = interval_95([ours / theirs for ours, theirs in pairs])
        write({"cell": f"batch {batch}", "what": "tokens_per_s, watching", "ratio": ratio, "half": half})


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description="vLLM's own order beside ours on the real model")
    parser.add_argument("--quick", action="store_true", help="three cells at one load, in about 75 minutes")
    parser.add_argument("--smoke", action="store_true", help="a little of everything: shows that it runs")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, help="one line a figure is added to this file")
    given = parser.parse_args(words)
    if given.requests < 8 or given.repetitions < 1:
        parser.error("--requests must be at least 8, --repetitions at least 1")

    def write(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        if given.json is not None:
            given.json.parent.mkdir(parents=True, exist_ok=True)
            with given.json.open("a") as file:
                file.write(json.dumps(line) + "\n")

    size = Size(requests=given.requests, repetitions=given.repetitions)
    if given.quick:
        size = Size((0.9,), None, given.repetitions)
    if given.smoke:
        size = Size((0.9,), 8, 2, TRIED[:2], 8)
    watching(BATCHES[:1] if given.smoke else BATCHES, size, write)
    named = QUICK[:2] if given.smoke else QUICK
    for cell in cells():
        if cell.name in named or not (given.quick or given.smoke):
            one_cell(cell, size, write)


if __name__ == "__main__":
    main(sys.argv[1:])
