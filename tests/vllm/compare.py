"""vLLM's own order beside ours on the real model: the same prompts at the same times, in turn, each in an engine of its
own. It needs an idle machine; `--quick` only shows that it runs. No assertions live here.

Two ways to queue: few slots, or little KV memory. A load is a share of the tokens a second that vLLM itself makes in
that cell when requests always wait. `python -m tests.vllm.compare --json FILE`.
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
LOADS = (0.7, 0.9, 1.1)
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


def serve(core: Any, asked: list[list[int]], at: list[float], number: int) -> dict[str, float]:
    """Figures in seconds: each prompt comes so long after the beginning."""
    served: dict[str, Served] = {}
    begun, coming = time.time(), list(zip(at, asked, strict=True))[::-1]
    while coming or core.scheduler.has_requests() or core.batch_queue:
        now = time.time()
        while coming and begun + coming[-1][0] <= now:
            after, prompt = coming.pop()
            id = f"c{number}-{len(coming)}"
            served[id] = Served(begun + after)
            add(core, id, prompt, MOST, arrival=begun + after, ignore_eos=False, stop_token_ids=[2])
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


def cells(quick: bool) -> list[Cell]:
    longest = -(-CONTEXT // BLOCK)
    few = [Cell(f"{slots} slots", slots) for slots in (SLOTS[:1] if quick else SLOTS)]
    short = [
        Cell(f"KV of {times} long requests", 64, times * longest + 1) for times in (BLOCKS[:1] if quick else BLOCKS)
    ]
    return [*few, *short]


def one_cell(cell: Cell, loads: tuple[float, ...], requests: int, repetitions: int, write: Any) -> None:
    asked = {**ORDER, "slots": cell.seqs}
    kinds = {"stock": cell.engine(None), "LAPS-SD": cell.engine(asked)}
    burst = prompts(min(requests, 4 * cell.seqs + 8), 1)
    tried = {
        kind: [serve(core, burst, [0.0] * len(burst), 10 + turn) for turn in range(2)] for kind, core in kinds.items()
    }
    saturated = {kind: max(each["tokens_per_s"] for each in runs) for kind, runs in tried.items()}
    mean_tokens = tried["stock"][0]["tokens"] / len(burst)
    write({"cell": cell.name, "what": "saturated tokens_per_s", **saturated, "mean_tokens": mean_tokens})
    for load in loads:
        told: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for repetition in range(repetitions):
            rng = random.Random(100 + repetition)
            rate = load * saturated["stock"] / mean_tokens
            at, now = [], 0.0
            for _ in range(requests):
                now += rng.expovariate(rate)
                at.append(now)
            texts = prompts(requests, repetition)
            for kind in list(kinds)[:: 1 if repetition % 2 else -1]:
                told[kind].append(serve(kinds[kind], texts, at, 1000 + repetition))
        for figure in ("mean_s", "p99_s", "p99_first_token_s", "p99_longest_pause_s", "tokens_per_s"):
            pairs = zip(told["LAPS-SD"], told["stock"], strict=True)
            ratio, half = interval_95([ours[figure] / max(1e-9, theirs[figure]) for ours, theirs in pairs])
            line = {kind: interval_95([each[figure] for each in runs])[0] for kind, runs in told.items()}
            write({"cell": cell.name, "load": load, "what": figure, **line, "ratio": ratio, "half": half})


def watching(batches: tuple[int, ...], repetitions: int, write: Any) -> None:
    """Tokens a second of a plug-in that only watches, beside vLLM without it."""
    cell = Cell("watching", max(batches))
    kinds = {"stock": cell.engine(None), "observe": cell.engine(WATCH)}
    for batch in batches:
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        asked = prompts(batch, 7)
        for repetition in range(repetitions + 1):
            for kind in list(kinds)[:: 1 if repetition % 2 else -1]:
                core, begun = kinds[kind], time.perf_counter()
                for number, prompt in enumerate(asked):
                    add(core, f"w{batch}-{repetition}-{number}", prompt, 64)
                tokens = sum(map(len, run_all(core).values()))
                core.scheduler.reset_prefix_cache()
                if repetition:  # the first one warms up
                    rates[kind].append(tokens / (time.perf_counter() - begun))
        pairs = zip(rates["observe"], rates["stock"], strict=True)
        ratio, half = interval_95([ours / theirs for ours, theirs in pairs])
        write({"cell": f"batch {batch}", "what": "tokens_per_s, watching", "ratio": ratio, "half": half})


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description="vLLM's own order beside ours on the real model")
    parser.add_argument("--quick", action="store_true", help="one small cell of each kind: shows that it runs")
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

    watching(BATCHES[:1] if given.quick else BATCHES, given.repetitions, write)
    for cell in cells(given.quick):
        one_cell(cell, LOADS[1:2] if given.quick else LOADS, given.requests, given.repetitions, write)


if __name__ == "__main__":
    main(sys.argv[1:])
