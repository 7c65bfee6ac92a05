"""What is compared: the settings, the runs and their order, the requests of each run. Runs nothing."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from laps_sd.loadtest.plan import Planned, arrivals
from scheduler_service.sim.costs import StepCosts
from worker_service.prompts import Prompt

BASE = "fcfs"  # the others are compared with it; its burst measures the capacity
BURST = "burst"
END_OF_PARAGRAPH = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Runs can be compared if these are equal. `max_tokens`: each request's bound is one of them. `paragraphs`: kinds
    of requests whose answers end with their first paragraph. `taught`: number of answers that the predictor learns from
    before the runs. `pace`: costs of a step; None: as fast as the machine is. `prompts`, `code`: digests."""

    model: str
    dtype: str
    drafter: str
    draft_len: int
    requests: int
    max_tokens: tuple[int, ...]
    paragraphs: tuple[str, ...]
    taught: int
    seed: int
    pace: StepCosts | None
    prompts: str
    code: str


@dataclass(frozen=True, slots=True)
class Cell:
    """`load`: share of the capacity; or BURST, where all requests arrive at once."""

    slots: int
    load: str

    @property
    def name(self) -> str:
        return f"{self.slots} slots, " + (self.load if self.load == BURST else f"load {self.load}")


@dataclass(frozen=True, slots=True)
class Run:
    """`policy`: name, with settings behind colons."""

    cell: Cell
    policy: str
    repetition: int  # from 1; each has its own requests, the same for every policy

    @property
    def name(self) -> str:
        policy = self.policy.replace(":", "+")
        return f"slots{self.cell.slots}-{self.cell.load}-repetition{self.repetition}-{policy}"

    @property
    def capacity(self) -> "Run":
        """The run that measures the capacity, which is load 1: the same requests, served as fast as possible."""
        return Run(Cell(self.cell.slots, BURST), BASE, self.repetition)

    def as_json(self) -> dict[str, Any]:
        return asdict(self.cell) | {"policy": self.policy, "repetition": self.repetition}

    @classmethod
    def of_json(cls, row: dict[str, Any]) -> "Run":
        return cls(Cell(row["slots"], row["load"]), row["policy"], row["repetition"])


def check_load(text: str) -> str:
    """`0.850` as `0.85`; burst as it is. Raises ValueError."""
    if text == BURST:
        return text
    try:
        load = float(text)
    except ValueError:
        load = math.nan
    if not 0.01 <= load <= 2:
        raise ValueError(f"{text!r} is neither burst nor a share of the capacity from 0.01 to 2")
    return f"{load:g}"


def runs(cells: Mapping[Cell, Sequence[str]], repetitions: int, seed: int) -> Iterator[Run]:
    """All runs, ordered by repetition, then by cell. The policies of a cell follow each other in random order, so that
    slow changes of the machine affect all of them alike. The run of the capacity comes before the loads, which need it.
    """
    for repetition in range(1, repetitions + 1):
        for cell in sorted(cells, key=lambda cell: (cell.slots, cell.load != BURST, cell.load)):
            order = [Run(cell, policy, repetition) for policy in cells[cell]]
            Random(f"order {seed} {repetition} {cell.name}").shuffle(order)
            if cell.load != BURST:
                yield order[0].capacity
            yield from order


class Drawn:
    """Draws the requests. The prompts that the predictor is taught with are used for nothing else."""

    def __init__(self, prompts: Sequence[Prompt], settings: Settings) -> None:
        """Raises ValueError if there are too few."""
        self._settings = settings
        shuffled = sorted(prompts, key=lambda prompt: prompt.id)
        Random(f"prompts {settings.seed}").shuffle(shuffled)
        kinds = sorted({prompt.category for prompt in shuffled})
        self._kinds = {kind: [prompt for prompt in shuffled if prompt.category == kind] for kind in kinds}
        if not kinds:
            raise ValueError("no prompt of a kind that is compared, or none that is short enough")
        self._taught = -(-settings.taught // len(kinds))
        self._each = -(-settings.requests // len(kinds))
        for kind, some in self._kinds.items():
            if (need := self._taught + self._each) > len(some):
                raise ValueError(f"only {len(some)} prompts of kind {kind!r}, where {need} are needed")

    def lesson(self) -> list[Planned]:
        """The requests that the predictor learns from; they have no due times."""
        prompts = [prompt for some in self._kinds.values() for prompt in some[: self._taught]]
        return self._planned(prompts, self._settings.taught, "lesson")

    def requests(self, repetition: int) -> list[Planned]:
        """The requests of a repetition, the same in every cell and for every policy, without due times."""
        rng = Random(f"requests {self._settings.seed} {repetition}")
        prompts = [prompt for some in self._kinds.values() for prompt in rng.sample(some[self._taught :], self._each)]
        return self._planned(prompts, self._settings.requests, f"repetition {repetition}")

    def _planned(self, prompts: list[Prompt], count: int, draw: str) -> list[Planned]:
        settings, rng = self._settings, Random(f"{draw} {self._settings.seed}")
        rng.shuffle(prompts)
        return [
            Planned(
                index=index,
                due_s=None,
                prompt=prompt.text,
                prompt_tokens=0,
                max_tokens=rng.choice(settings.max_tokens),
                ignore_eos=False,
                category=prompt.category,
                stop=(END_OF_PARAGRAPH,) if prompt.category in settings.paragraphs else (),
            )
            for index, prompt in enumerate(prompts[:count])
        ]


def due(run: Run, count: int, capacity: float, seed: int) -> list[float]:
    """Arrival times in seconds: a Poisson process with the load's share of `capacity`, in requests a second."""
    rate = math.inf if run.cell.load == BURST else float(run.cell.load) * capacity
    return arrivals(count, rate, seed=1000 * seed + run.repetition)
