"""A service of many cells: each is a Simulation of its own, in lockstep with the others, and gateways choose between
them by what they were told a while ago. The cells are spread over processes. A live gateway's choice: gateway/cells.py.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import ceil, inf
from multiprocessing.connection import Connection
from random import Random
from typing import Any, Literal, NamedTuple

from scheduler_service.core import backlog
from scheduler_service.core.policies import Policy
from scheduler_service.core.types import RequestClass
from scheduler_service.predictor import PredictorKind, make_predictor
from scheduler_service.sim.processes import SPAWN, begin
from scheduler_service.sim.simulator import Simulation, max_tokens
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job

STEP_S = 0.1  # the cells advance by so much at a time
GATEWAYS = 4  # each knows only what it has sent itself since a cell spoke
Route = Literal["p2c", "affinity", "hash", "random"]  # affinity: all inputs of a tenant begin alike


class Kill(NamedTuple):
    """A cell whose schedulers and Redis die at `at_s`, and are back `down_s` later with all that was accepted."""

    cell: int
    at_s: float
    down_s: float


@dataclass(frozen=True, slots=True)
class CellSettings:
    """`fleet`: of each cell. `view_lag_s`: how old what gateways know of a cell is. `most_tokens`: of any request."""

    cells: int
    fleet: SimFleet
    policy: Policy
    predictor: PredictorKind
    route: Route = "p2c"
    view_lag_s: float = 0.3
    kill: Kill | None = None
    processes: int = 1
    seed: int = 0


class Fared(NamedTuple):
    """How one request fared, in seconds."""

    id: str
    tenant: str
    latency_s: float
    cell: int


class View(NamedTuple):
    """The load that a cell tells gateways: vacant slots, seconds of work, and what a mean request adds."""

    free: int
    backlog_s: float
    request_s: float


def run_cells(jobs: Sequence[Job], settings: CellSettings) -> list[Fared]:
    """All requests to their end."""
    processes = min(settings.processes, settings.cells)
    shares = [list(range(number, settings.cells, processes)) for number in range(processes)]
    most, ordered = max_tokens(jobs), sorted(jobs, key=lambda job: job.arrival_s)
    if processes == 1:
        return list(_lockstep(ordered, settings, shares, [_Share(shares[0], settings, most)]))
    pipes, children = [], []
    for share in shares:
        ours, theirs = SPAWN.Pipe()
        child = SPAWN.Process(target=_serve, args=(theirs, share, settings, most), daemon=True)
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    try:
        return list(_lockstep(ordered, settings, shares, pipes))
    finally:
        for pipe in pipes:
            pipe.close()
        for child in children:
            child.join(5)


def _lockstep(
    jobs: Sequence[Job], settings: CellSettings, shares: Sequence[list[int]], pipes: "Sequence[Connection | _Share]"
) -> Iterator[Fared]:
    router, at, steps = Router(settings), 0, 0
    while at < len(jobs):
        steps += 1
        offered: dict[int, list[Job]] = {}
        while at < len(jobs) and jobs[at].arrival_s < steps * STEP_S:
            offered.setdefault(router.choose(jobs[at]), []).append(jobs[at])
            at += 1
        for share, pipe in zip(shares, pipes, strict=True):
            pipe.send((steps * STEP_S, {cell: offered[cell] for cell in share if cell in offered}))
        views: dict[int, View] = {}
        for pipe in pipes:
            views |= pipe.recv()
        router.told(views)
    for pipe in pipes:
        pipe.send((inf, {}))
    for pipe in pipes:
        yield from pipe.recv()


class Router:
    """Gateways that choose a cell for each request."""

    def __init__(self, settings: CellSettings) -> None:
        self._settings, self._random = settings, Random(f"route {settings.seed}")
        empty = dict.fromkeys(range(settings.cells), View(settings.fleet.workers * settings.fleet.slots, 0.0, 0.0))
        self._lag = max(1, ceil(settings.view_lag_s / STEP_S))
        self._views: deque[dict[int, View]] = deque([empty], self._lag)
        self._sent = [dict.fromkeys(range(settings.cells), 0) for _ in range(GATEWAYS)]
        self._steps = 0

    def told(self, views: dict[int, View]) -> None:
        """Another step is over."""
        self._views.append(views)
        self._steps += 1
        if self._steps % self._lag == 0:
            for sent in self._sent:
                sent.update(dict.fromkeys(sent, 0))

    def choose(self, job: Job) -> int:
        kill = self._settings.kill
        down = kill is not None and kill.at_s <= job.arrival_s < kill.at_s + kill.down_s
        able = [cell for cell in range(self._settings.cells) if not (down and kill is not None and cell == kill.cell)]
        match self._settings.route:
            case "random":
                return self._random.choice(able)
            case "hash":
                return max(able, key=lambda cell: _weight(cell, job.id))
        sent, views = self._random.choice(self._sent), self._views[0]
        if self._settings.route == "affinity":
            own = max(able, key=lambda cell: _weight(cell, job.tenant))
            if GATEWAYS * sent[own] < views[own].free:
                sent[own] += 1
                return own
        two = self._random.sample(able, min(2, len(able)))

        def wait(cell: int) -> tuple[bool, float]:
            view = views[cell]
            return sent[cell] >= view.free, view.backlog_s + sent[cell] * view.request_s

        best = min(two, key=wait)
        sent[best] += 1
        return best


def _weight(cell: int, key: str) -> bytes:
    return hashlib.blake2b(f"{cell} {key}".encode(), digest_size=8).digest()


class _Share:
    """Some of the cells. It is spoken to as a pipe to a process that has them."""

    def __init__(self, cells: list[int], settings: CellSettings, most: int) -> None:
        self._cells = {cell: _Cell(cell, settings, most) for cell in cells}
        self._answer: dict[int, View] | list[Fared] = []

    def send(self, asked: tuple[float, dict[int, list[Job]]]) -> None:
        """Advance until then, with these requests. At the end of time: how all have fared."""
        until_s, offered = asked
        for cell, jobs in offered.items():
            self._cells[cell].offer(jobs)
        for each in self._cells.values():
            each.advance(until_s)
        if until_s == inf:
            self._answer = [fared for each in self._cells.values() for fared in each.fared()]
        else:
            self._answer = {cell: each.view() for cell, each in self._cells.items()}

    def recv(self) -> Any:
        return self._answer


def _serve(pipe: "Connection", cells: list[int], settings: CellSettings, most: int) -> None:
    """A process with some of the cells."""
    begin()
    share = _Share(cells, settings, most)
    while True:
        asked = pipe.recv()
        share.send(asked)
        pipe.send(share.recv())
        if asked[0] == inf:
            return


class _Cell:
    """One cell. While it is down its own clock stands still."""

    def __init__(self, number: int, settings: CellSettings, most: int) -> None:
        self._number = number
        self._kill = settings.kill if settings.kill and settings.kill.cell == number else None
        predictor = make_predictor(settings.predictor) if settings.policy.asks else None
        policy = deepcopy(settings.policy)
        self._simulation = Simulation([], policy, settings.fleet, predictor=predictor, most_tokens=most)

    def _own_s(self, time_s: float) -> float:
        if self._kill is None or time_s <= self._kill.at_s:
            return time_s
        return max(self._kill.at_s, time_s - self._kill.down_s)

    def offer(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._simulation.offer(replace(job, arrival_s=self._own_s(job.arrival_s)))

    def advance(self, until_s: float) -> None:
        self._simulation.advance(self._own_s(until_s))

    def view(self) -> View:
        fleet = self._simulation.core.fleet
        free = sum(max(worker.vacancy, 0) for worker in fleet.workers.values())
        return View(free, backlog.waits_s(fleet)[RequestClass.DEFAULT], backlog.request_s(fleet))

    def fared(self) -> Iterator[Fared]:
        for outcome in self._simulation.trace.outcomes:
            stood = self._kill is not None and outcome.job.arrival_s <= self._kill.at_s < outcome.end_s
            latency_s = outcome.latency_s + (self._kill.down_s if stood and self._kill else 0.0)
            yield Fared(outcome.job.id, outcome.job.tenant, latency_s, self._number)
