"""vLLM's own order beside LAPS-SD on the real model, in seconds: the same requests at the same times, in turn, on one
engine that is loaded once. It needs an idle machine, and makes the most telling runs first.

`python -m tests.vllm.compare --minutes 25` in vLLM's environment. Each run is one line of a file in `--folder`, which
is named by the code that made it, and is not made again: broken off, or out of time, it goes on where it was. After
each run `compare_page.py` makes the page anew. `--smoke` makes a little of everything, and leaves the page alone. No
assertions of tests live here.
"""

import argparse
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from typing import Any

from laps_sd import own_prompts
from scheduler_service.sim.journal import code_digest
from tests.vllm.compare_page import Key, Lines, section, summary, told, write_page
from tests.vllm.drive import MODEL
from tests.vllm.turns import BLOCK, ROWS, Asked, Cell, Run, Served, Turns

MOST_PROMPT, MOST = 64, 256  # tokens of a request
LONGEST = -(-(MOST_PROMPT + MOST) // BLOCK)  # its blocks
PLENTY = ROWS * LONGEST + 1
FOLDER = Path("build/vllm-figures")
KINDS: dict[str, dict[str, Any] | None] = {"stock": None, "observe": {"mode": "observe"}, "order": {"mode": "order"}}


@dataclass(frozen=True)
class Size:
    """`rounds`: of bursts, each of `burst` requests a place: many short ones, since the machine's speed changes within
    half a minute, and two that follow each other meet nearly the same. `requests`: of a run at a load, of which there
    are `repetitions`. `most`: output tokens, of a burst `most_of_burst`."""

    tried: tuple[int, ...] = (8, 16, 32, 64)  # max_num_seqs
    watched: tuple[int, ...] = (1, 8, 16)
    burst: int = 2
    rounds: int = 12
    most_of_burst: int = 64
    requests: int = 300
    repetitions: int = 3
    most: int = MOST
    loads: tuple[float, ...] = (1.0, 1.1, 0.7)  # beside 0.9
    others: bool = True  # cells


TOLD = Cell("4 slots", 4, PLENTY), Cell("KV of 4 long requests", ROWS, 4 * LONGEST + 1)
OTHERS = [Cell(f"{slots} slots", slots, PLENTY) for slots in (2, 16, 8, 32)]
OTHERS += [Cell(f"KV of {times} long requests", ROWS, times * LONGEST + 1) for times in (8, 6)]
SMOKE = Size((2, 4), (1,), 2, 2, 8, 8, 1, 8, (), others=False)


class OutOfTime(Exception):
    """The next run is left to the next time."""


@dataclass
class Runs:
    """What was run, in the file; what is there is not run again."""

    file: Path
    until: float  # of time.monotonic
    tell: Callable[[Lines], None]
    lines: Lines = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            whole = [line for line in self.file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            self.file.write_text("".join(whole))  # without one that was cut short
            self.lines = {Key(*key): value for key, value in map(json.loads, whole)}

    def of(self, key: Key, make: Callable[[], dict[str, Any]], beside: Sequence[Key] = ()) -> dict[str, Any]:
        """`beside`: what it is compared with; begun, it is ended even out of time. Raises OutOfTime."""
        if key not in self.lines:
            if time.monotonic() > self.until and not any(other in self.lines for other in beside):
                raise OutOfTime
            self.lines[key] = make()
            with self.file.open("a") as file:
                file.write(json.dumps([key, self.lines[key]]) + "\n")
            print(f"{time.strftime('%H:%M:%S')} {key}: {told(self.lines[key])}", flush=True)
            self.tell(self.lines)
        return self.lines[key]


@cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@cache
def _prompts() -> list[list[int]]:
    """The project's own, in the model's form of a chat."""
    turns = [[{"role": "user", "content": text}] for _, text in own_prompts.texts()]
    given = {"add_generation_prompt": True, "return_dict": False}
    ids = [_tokenizer().apply_chat_template(turn, **given) for turn in turns]
    return [each for each in ids if len(each) <= MOST_PROMPT]


def requests(count: int, seed: int, most: int) -> list[Asked]:
    """The model ends them, or the bound that their client set."""
    rng = random.Random(seed)
    return [Asked(rng.choice(_prompts()), min(rng.choice(own_prompts.BOUNDS), most)) for _ in range(count)]


def whole(count: int, seed: int, most: int) -> list[Asked]:
    """Of fixed lengths, from 7 tokens on: every order makes the same tokens."""
    rng = random.Random(seed)
    lengths = [round(math.exp(rng.uniform(math.log(7), math.log(max(8, most))))) for _ in range(count)]
    return [Asked(rng.choice(_prompts()), length, True) for length in lengths]


def _whole_rate(served: Sequence[Served]) -> float:
    return sum(each.tokens for each in served) / max(each.last for each in served)


def _rate_of(served: Sequence[Served]) -> float:
    """Tokens a second of a burst. Its last ones run by themselves, so it is that until all have begun."""
    begun = max(each.first for each in served)
    done = sum(min(1.0, (begun - each.first) / max(1e-9, each.last - each.first)) * each.tokens for each in served)
    return max(_whole_rate(served), done / begun)


@dataclass(frozen=True)
class Compared:
    """All parts, the most telling first."""

    size: Size
    runs: Runs
    turns: Turns
    folder: Path

    def everything(self) -> None:
        """Raises OutOfTime."""
        size = self.size
        for cell in TOLD:
            self.load(cell, 0.9, 0)
        self.saturation()
        self.watching()
        for number, cell in product(range(1, size.repetitions), TOLD):
            self.load(cell, 0.9, number)
        for load, cell, number in product(size.loads, TOLD, range(size.repetitions)):
            self.load(cell, load, number)
        for cell, number in product(OTHERS if size.others else (), range(size.repetitions)):
            self.load(cell, 0.9, number)

    def some(self, cells: Sequence[Cell], loads: Sequence[float]) -> None:
        """Raises OutOfTime."""
        for number, cell, load in product(range(self.size.repetitions), cells, loads):
            self.load(cell, load, number)

    def saturation(self) -> None:
        """All at once, at the max_num_seqs at which vLLM's own order makes most tokens a second: as long as somebody
        waits, since an order that leaves the longest for the end is alone with them in the end."""
        tried = self.size.tried
        rates = {seqs: self._burst(Key("best", seqs, "stock"), seqs, max(tried)) for seqs in tried}
        best = max(rates, key=rates.__getitem__)
        for number in range(self.size.rounds):
            for kind in _turned(list(KINDS), number):
                self._burst(Key("saturation", best, kind, number=number), best, best, _rate_of)

    def watching(self) -> None:
        for seqs, number in product(self.size.watched, range(self.size.rounds)):
            for kind in _turned(["stock", "observe"], number):
                self._burst(Key("watching", seqs, kind, number=number), seqs, seqs)

    def _burst(
        self, key: Key, seqs: int, places: int, rate_of: Callable[[Sequence[Served]], float] = _whole_rate
    ) -> float:
        """Tokens a second."""
        asked = whole(max(3, self.size.burst * places), 7, self.size.most_of_burst)

        def make() -> dict[str, Any]:
            run = self._serve(Cell("", seqs, PLENTY), key.kind, asked, [0.0] * len(asked))
            assert [each.tokens for each in run.served] == [each.most for each in asked]
            return {"tokens_per_s": rate_of(run.served), **_fell(run)}

        return float(self.runs.of(key, make)["tokens_per_s"])

    def load(self, cell: Cell, load: float, number: int) -> None:
        """Requests that come at random, so many that they ask for that share of the tokens a second that vLLM's own
        order makes as long as somebody waits."""
        seed = round(1000 * load) + number  # no run has learned from the requests of another
        asked, burst = requests(self.size.requests, seed, self.size.most), self._saturated(cell)
        rate = load * burst["tokens_per_s"] / expected_tokens(asked, burst["answers"])
        rng, at = random.Random(seed), [0.0]
        while len(at) < len(asked):
            at.append(at[-1] + rng.expovariate(rate))
        kinds = _turned(["stock", "order"], number)
        keys = {kind: Key(cell.name, cell.seqs, kind, load, number) for kind in kinds}
        for kind, key in keys.items():

            def make(kind: str = kind) -> dict[str, Any]:
                run = self._serve(cell, kind, asked, at, learned=self._taught(cell))
                came = rate * sum(each.tokens for each in run.served) / len(asked) / burst["tokens_per_s"]
                return _seen(run.served) | {"came": came, "waited": run.waited} | _fell(run)

            self.runs.of(key, make, beside=list(keys.values()))

    def _saturated(self, cell: Cell) -> dict[str, Any]:
        """A burst in vLLM's own order: tokens a second, as long as somebody waits; of each answer, bound and tokens."""
        asked = requests(max(self.size.requests // 3, 8), 99, self.size.most)
        burst: dict[str, Any] = {}
        for kind in ("order", "stock"):  # the one learns from it

            def make(kind: str = kind) -> dict[str, Any]:
                if kind == "order":
                    self._lessons(cell).unlink(missing_ok=True)
                run = self._serve(cell, kind, asked, [0.0] * len(asked), learned=self._lessons(cell))
                told = [[one.most, each.tokens] for one, each in zip(asked, run.served, strict=True)]
                return {"tokens_per_s": _rate_of(run.served), "waited": run.waited, "answers": told}

            burst = self.runs.of(Key(cell.name, cell.seqs, kind), make)
        return burst

    def _lessons(self, cell: Cell) -> Path:
        """Of that burst."""
        return self.folder / f"{cell.name}.learned"

    def _taught(self, cell: Cell) -> Path:
        """A copy of them, which a run may add to."""
        return Path(shutil.copyfile(self._lessons(cell), self.folder / "run.learned"))

    def _serve(
        self, cell: Cell, kind: str, asked: Sequence[Asked], at: Sequence[float], *, learned: Path | None = None
    ) -> Run:
        ours = KINDS[kind]
        if ours is not None:
            ours = ours | {"compare": False, "learned": str(learned) if learned else False}
        return self.turns.serve(cell, ours, asked, at)


def expected_tokens(asked: Sequence[Asked], answers: Sequence[Sequence[int]]) -> float:
    """Of an answer, on average. `answers`: bound and tokens of others: those with a larger bound are cut at it. A few
    large bounds more or less in one of the two would else be taken for more or less load."""
    bounds = {each.most for each in asked}
    by_bound = {bound: [min(bound, tokens) for most, tokens in answers if most >= bound] for bound in bounds}
    return fmean(fmean(by_bound[each.most] or [each.most]) for each in asked)


def _seen(served: list[Served]) -> dict[str, Any]:
    fields = ("arrival", "first", "last", "pause", "tokens")
    return {name: [round(getattr(each, name), 4) for each in served] for name in fields}


def _fell(run: Run) -> dict[str, Any]:
    return {"fell_back": run.fell_back} if run.fell_back else {}


def _code() -> str:
    """Of what makes the figures: those of other code are not put beside them."""
    folders = ("laps_sd_vllm", "scheduler_service/core", "scheduler_service/predictor")
    files = [Path(__file__), Path(__file__).with_name("turns.py"), Path(__file__).with_name("drive.py")]
    return code_digest(chain(files, *(Path(folder).rglob("*.py") for folder in folders)))[:8]


def _turned(kinds: list[str], number: int) -> Iterator[str]:
    """Another one begins each time."""
    first = number % len(kinds)
    yield from kinds[first:] + kinds[:first]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="vLLM's own order beside LAPS-SD on the real model, in seconds")
    parser.add_argument("--minutes", type=float, default=25.0, help="after these no run is begun (25)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"of the runs ({FOLDER})")
    names = [cell.name for cell in (*TOLD, *OTHERS)]
    parser.add_argument("--cells", nargs="+", choices=names, metavar="CELL", help=f"these only, of: {', '.join(names)}")
    parser.add_argument("--loads", nargs="+", type=float, default=[0.9], metavar="LOAD", help="of these cells (0.9)")
    parser.add_argument("--smoke", action="store_true", help="a little of everything, which proves nothing")
    given = parser.parse_args(words)
    folder = given.folder / "smoke" if given.smoke else given.folder
    code = _code()
    tell = (lambda lines: None) if given.smoke else partial(write_page, code=code)
    runs = Runs(folder / f"runs-{code}.jsonl", time.monotonic() + 60 * given.minutes, tell)
    try:
        compared = Compared(SMOKE if given.smoke else Size(), runs, Turns(PLENTY), folder)
        if given.cells:
            compared.some([cell for cell in (*TOLD, *OTHERS) if cell.name in given.cells], given.loads)
        else:
            compared.everything()
    except OutOfTime:
        print("out of time; the same command goes on from here")
    print(section(summary(runs.lines, code)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
