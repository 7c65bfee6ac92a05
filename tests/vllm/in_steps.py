"""vLLM's own order beside ours, counted in steps: vLLM's engine, scheduler and memory on the toy executor, under a
clock that a step takes one further. There is no model and no wall clock, so a busy machine changes nothing.

`python -m tests.vllm.in_steps --json FILE` in vLLM's environment; `in_steps_page.py` makes the page of the file. Rows
that are in the file are not made again: broken off, it goes on where it was.
A step counts one, however many requests are in it: what a step costs is left to `compare.py`.
"""

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import fsum
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm import envs

from laps_sd_vllm import advice, learning, plugin, reporting
from laps_sd_vllm.background import Background
from scheduler_service.predictor.fit import fit
from scheduler_service.predictor.window import Window
from scheduler_service.sim.results import interval_95, percentile
from tests.vllm.drive import add, step
from tests.vllm.play import BLOCK, Way, toy_core
from tests.vllm.toy import Ending

END, STEP_S = 2, 0.02
SLOTS, BLOCKS, TRIED = (2, 4, 8, 16, 32), (4, 6, 8), (2, 4, 8, 16, 32, 64)
MOST_PROMPT, MOST = 150, 512  # tokens of a request
LONGEST = -(-(MOST_PROMPT + MOST) // BLOCK)  # its blocks
MEDIANS, SPREAD = (12, 40, 150, 400), 0.5  # of output tokens, by kind of prompt; log-normal
COUNTED, BURST, SEEDS = 100, 120, 4  # requests of a run; of one that measures saturation; runs
KNOWN = ("learned", "bounded", "nothing")  # of lengths: by the predictor; max_tokens is the length; neither
AT_ALL_LOADS = ("2 slots", "8 slots", "32 slots", "KV of 4 long requests", "KV of 8 long requests")


@dataclass(frozen=True)
class Cell:
    """`slots`: vLLM's --max-num-seqs; None: the best one. `blocks`: of KV."""

    name: str
    slots: int | None
    blocks: int = 64 * LONGEST + 1


CELLS = [Cell(f"{each} slots", each) for each in SLOTS]
CELLS += [Cell(f"KV of {each} long requests", None, each * LONGEST + 1) for each in BLOCKS]


@dataclass(frozen=True)
class Asked:
    """`most`: max_tokens. `hint`: how long its client says that it will be."""

    id: str
    prompt: list[int]
    length: int
    most: int = MOST
    hint: int | None = None


@dataclass
class Served:
    arrival: float
    got: list[float] = field(default_factory=list)  # at the ends of which steps tokens came
    tokens: int = 0


@dataclass
class Clock:
    """In place of the module `time`. A step takes `step`, and `token` for each token that it computes; no plan takes
    any. `unit_s`: what a unit of these numbers is in seconds."""

    unit_s: float = STEP_S
    step: float = 1.0
    token: float = 0.0
    now: float = 0.0

    def took(self, tokens: int) -> None:
        self.now += self.step + self.token * tokens

    def time(self) -> float:
        return self.now * self.unit_s

    perf_counter = monotonic = time

    def thread_time(self) -> float:
        return 0.0


class AtOnce(Background):
    """Jobs are done when they are begun."""

    def start(self, name: str, job: Callable[[], Any], *, process: bool = False) -> bool:
        self._done.put((name, job(), None))
        return True


def requests(count: int, seed: int) -> list[Asked]:
    rng, asked = random.Random(seed), []
    for number in range(count):
        kind = rng.randrange(len(MEDIANS))
        prompt = [600 + kind] * 4 + [610 + rng.randrange(390) for _ in range(rng.randint(10, MOST_PROMPT - 4))]
        length = round(MEDIANS[kind] * math.exp(rng.gauss(0, SPREAD)))
        asked.append(Asked(f"s{seed}-{number}", prompt, min(max(2, length), MOST)))
    return asked


def engine(cell: Cell, seqs: int, ours: str | None) -> Any:
    """`ours`: what our order knows of lengths; None: vLLM's own order."""
    asked = {"mode": "order", "learned": False, "compare": False, "slots": seqs}
    asked["predictor"] = "online" if ours == "learned" else "none"
    return toy_core(
        Way(False, False, 4, cell.blocks), plugin.__package__ + ".LapsSdScheduler" if ours else None, Ending,
        max_num_seqs=seqs, max_model_len=1024, max_num_batched_tokens=512,
        additional_config={"laps_sd": asked} if ours else {},
    )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """`waiting`: tokens a step, as long as somebody waited; `all`: from the first step to the last. `waited`: the share
    of the time in which somebody did."""

    served: list[Served]
    waiting: float
    all: float
    waited: float


def serve(core: Any, clock: Clock, asked: list[Asked], at: list[float]) -> Run:
    """`at`: in the clock's unit."""
    Ending.lengths = {each.id: len(each.prompt) + each.length for each in asked}
    Ending.took = clock.took
    served = {each.id: Served(when) for each, when in zip(asked, at, strict=True)}
    coming, live, waited, made = list(zip(at, asked, strict=True))[::-1], set[str](), 0.0, 0
    while coming or live:
        if not live:
            clock.now = max(clock.now, coming[-1][0])
        while coming and coming[-1][0] <= clock.now:
            when, each = coming.pop()
            said: dict[str, Any] = {} if each.hint is None else {"extra_args": {"laps_sd_tokens": each.hint}}
            arrival = when * clock.unit_s
            add(core, each.id, each.prompt, each.most, arrival=arrival, ignore_eos=False, stop_token_ids=[END], **said)
            live.add(each.id)
        began = clock.now
        told = step(core)
        if len(told) < len(live):  # one that is prefilled tells nothing yet, and counts as waiting
            waited += clock.now - began
            made += sum(len(tokens) for tokens, _ in told.values())
        for id, (tokens, ended) in told.items():
            if tokens:
                served[id].got.append(clock.now)
                served[id].tokens += len(tokens)
            if ended:
                live.discard(id)
    fallen = getattr(core.scheduler, "fallen", False)
    assert not fallen, core.scheduler.advice.status.why
    assert [served[each.id].tokens for each in asked] == [each.length for each in asked]
    tokens = sum(each.length for each in asked)
    return Run(list(served.values()), made / max(clock.step, waited), tokens / clock.now, waited / clock.now)


def figures(served: list[Served]) -> dict[str, float]:
    """In steps."""
    latencies = sorted(each.got[-1] - each.arrival for each in served)
    firsts = sorted(each.got[0] - each.arrival for each in served)
    pauses = sorted(max((b - a for a, b in zip(each.got, each.got[1:], strict=False)), default=0.0) for each in served)
    return {
        "mean": fsum(latencies) / len(latencies),
        "p99": percentile(latencies, 0.99),
        "p99 first token": percentile(firsts, 0.99),
        "p99 longest pause": percentile(pauses, 0.99),
    }


@contextmanager
def in_virtual_time(clock: Clock) -> Iterator[None]:
    """LAPS-SD inside vLLM goes by this clock."""
    with ExitStack() as patched:
        for owner, name, value in (
            (plugin, "time", clock), (reporting, "time", clock), (advice, "Background", AtOnce),
            (learning, "_fit", lambda background, known: fit(Window.of(known))),
        ):  # fmt: skip
            patched.enter_context(patch.object(owner, name, value))
        yield


def run(cell: Cell, seqs: int, ours: str | None, asked: list[Asked], at: list[float]) -> Run:
    clock = Clock()
    if ours == "bounded":
        asked = [replace(each, most=each.length) for each in asked]
    with in_virtual_time(clock):
        core = engine(cell, seqs, ours)
        served = serve(core, clock, asked, at)
        core.scheduler.shutdown()
    return served


def burst(cell: Cell, seqs: int, ours: str | None) -> Run:
    """All at once."""
    return run(cell, seqs, ours, requests(BURST, 999), [0.0] * BURST)


def about_cell(cell: Cell, seeds: int) -> dict[str, Any]:
    """What all rows of the cell say: which max_num_seqs is vLLM's best, of bursts in its own order."""
    tried = {seqs: burst(cell, seqs, None) for seqs in ([cell.slots] if cell.slots is not None else TRIED)}
    seqs = max(tried, key=lambda each: tried[each].waiting)
    bursts = {"stock": tried[seqs].all, "ours": burst(cell, seqs, "learned").all}
    row = {**asdict(cell), "seqs": seqs, "tried": {each: told.waiting for each, told in tried.items()}}
    return row | {"burst": bursts, "requests": COUNTED * seeds, "seeds": seeds}


def shared(row: dict[str, Any]) -> dict[str, Any]:
    """The same of a row that is there."""
    return {name: row[name] for name in ("name", "slots", "blocks", "seqs", "tried", "burst", "requests", "seeds")}


def in_order(row: dict[str, Any]) -> tuple[int, float, int]:
    """Of the table: as the cells are listed, at load 0.9 first."""
    return [cell.name for cell in CELLS].index(row["name"]), abs(row["load"] - 0.9), KNOWN.index(row["known"])


def one(cell: Cell, seqs: int, rate: float, known: str, seeds: int) -> dict[str, Any]:
    """Both orders on the same requests at the same times. `rate`: requests a step."""
    told: dict[str, list[dict[str, float]]] = {"stock": [], "ours": []}
    warm = 40 + 2 * seqs  # requests that fill the engine, and teach the predictor
    for seed in range(seeds):
        rng, at, now = random.Random(seed), list[float](), 0.0
        for _ in range(warm + COUNTED):
            now += rng.expovariate(rate)
            at.append(now)
        asked = requests(warm + COUNTED, seed)
        for kind, ours in (("stock", None), ("ours", known)):
            served = run(cell, seqs, ours, asked, at).served
            told[kind].append(figures(served[warm:]))
    row: dict[str, Any] = {kind: {name: _mean(runs, name) for name in runs[0]} for kind, runs in told.items()}
    pairs = list(zip(told["ours"], told["stock"], strict=True))
    row["ratio"] = {
        name: interval_95([ours[name] / max(1.0, theirs[name]) for ours, theirs in pairs]) for name in told["stock"][0]
    }
    return row


def _mean(runs: list[dict[str, float]], name: str) -> float:
    return fsum(each[name] for each in runs) / len(runs)


def wanted(cell: Cell) -> list[tuple[float, str]]:
    """Loads, and what is known of lengths."""
    more = [(0.9, "bounded"), (0.9, "nothing")] * (cell.name in ("2 slots", "KV of 4 long requests"))
    loads = [(0.7, "learned"), (1.1, "learned")] * (cell.name in AT_ALL_LOADS)
    return [(0.9, "learned"), *more, *loads]


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description="vLLM's own order beside ours, counted in steps")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--cells", default="", help="only cells whose name begins so")
    given = parser.parse_args(words)
    if given.seeds < 2:
        parser.error("--seeds must be at least 2: an interval needs two")
    envs.VLLM_CACHE_ROOT = tempfile.mkdtemp()
    rows: list[dict[str, Any]] = []
    if given.json is not None and given.json.exists():
        rows = json.loads(given.json.read_text())
    for cell in CELLS:
        there = [row for row in rows if (row["name"], row["seeds"]) == (cell.name, given.seeds)]
        missing = [each for each in wanted(cell) if each not in [(row["load"], row["known"]) for row in there]]
        if not missing or not cell.name.startswith(given.cells):
            continue
        about = shared(there[0]) if there else about_cell(cell, given.seeds)
        rate = max(about["tried"].values()) * BURST / fsum(each.length for each in requests(BURST, 999))
        for load, known in missing:
            row = about | {"load": load, "known": known} | one(cell, about["seqs"], load * rate, known, given.seeds)
            print(json.dumps(row), flush=True)
            rows.append(row)
            if given.json is not None:
                given.json.write_text(json.dumps(sorted(rows, key=in_order), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
