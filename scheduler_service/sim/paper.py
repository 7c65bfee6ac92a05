"""The LAPS-SD paper, reproduced: kinds of requests, loads, readings, ablations, and the region with nothing to gain.

`make bench-paper`, or `python -m scheduler_service.sim.paper --help`. Here simulations run and their figures become a
JSON file; what is said about them is the business of `paper_page`. A run that was stopped goes on where it was.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from scheduler_service import core, sim
from scheduler_service.core.policies import Claim, LapsSd
from scheduler_service.core.types import View
from scheduler_service.sim.bench import one_seed
from scheduler_service.sim.generate import KINDS, MIX, Synthetic, generate
from scheduler_service.sim.journal import Journal, code_digest
from scheduler_service.sim.plain import Plain
from scheduler_service.sim.processes import pool
from scheduler_service.sim.results import percentile
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job

READINGS = {  # of what the paper leaves open, by the name used on the page
    "total": "laps-sd",
    "remaining": "laps-sd:key=remaining",
    "stay": "laps-sd:destination=stay",
    "laps-sd*": "laps-sd:key=remaining:destination=remaining:epsilon=0.1",
}
BASES = ("fcfs", "sjf", "las", "mlfq")
OTHERS = ("srpt-length", "gsa", "gittins", "oracle")
MAPPED = ("fcfs", READINGS["laps-sd*"], "gittins", "oracle")
ABLATIONS: Mapping[str, Sequence[object]] = {  # around the defaults of `laps-sd`, one setting at a time
    "queues": (1, 2, 4, 8, 12),
    "first_queue_rounds": (3, 5, 20, 40),
    "window": (2, 4, 16, 32),
    "epsilon": (0.02, 0.1, 0.2, 1.0),
    "length_margin": (0.0, 0.5, 1.0),
    "key": ("remaining",),
    "destination": ("remaining", "stay"),
    "overtaking": (5, 20),
}
SIGMAS = (0.0, 0.3, 0.5)
DRAFT_LEN = 5  # at which the acceptance of the kinds was measured
REFERENCE_LOAD = 0.85  # of errors, ablations and longer tails


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is simulated. `slots`: of the map, beside the one that all else has."""

    requests: int = 1100
    seeds: int = 4
    loads: tuple[float, ...] = (0.5, 0.7, 0.85, 0.9, 0.95)
    slots: tuple[int, ...] = (2, 4, 8, 32)

    def requests_at(self, slots: int) -> int:
        """With many slots a run needs more requests to leave its beginning behind."""
        return self.requests * max(1, slots // 16)


QUICK = Scale(requests=12, seeds=2, loads=(0.5, 0.9), slots=(4,))


@dataclass(frozen=True, slots=True)
class Case:
    """Policies on one workload; its figures go to `results[experiment][row][column]`."""

    experiment: str
    row: str
    column: str
    workload: Synthetic
    slots: int
    policies: tuple[str, ...]

    def unit(self, seed: int) -> str:
        """The name of its run with `seed`."""
        return f"{self.experiment}/{self.row}/{self.column}/{seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder: of paper/, explanation/paper.md")
    parser.add_argument("--requests", type=int, default=Scale().requests)
    parser.add_argument("--seeds", type=int, default=Scale().seeds)
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes; the results do not depend on it"
    )
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes, and nothing to rely on")
    parser.add_argument("--only", metavar="P,P", help="measure these policies anew and keep the other figures")
    parser.add_argument("--page", action="store_true", help="simulate nothing, write the page anew from its figures")
    flags = parser.parse_args()
    try:
        from scheduler_service.sim import paper_page
    except ImportError:
        parser.error("needs the extra: pip install 'laps-sd[lab]'")
    if min(flags.requests, flags.seeds - 1, flags.jobs) < 1:
        parser.error("--requests and --jobs must be at least 1, --seeds at least 2")
    path = flags.out / "paper" / "results.json"
    scale = QUICK if flags.quick else Scale(flags.requests, flags.seeds)
    kept: dict[str, Any] = {}
    if flags.page or flags.only is not None:
        try:
            kept = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"{path}: {error}")
    if flags.page:
        paper_page.write(kept, flags.out)
        return
    if flags.only is not None and kept.get("settings") != json.loads(json.dumps(settings(scale))):
        parser.error(f"--only: {path} was made with other settings")
    only = None if flags.only is None else flags.only.split(",")
    run = {"settings": settings(scale), "only": only, "code": code_digest(_code())}
    with Journal(path.with_name("unfinished.jsonl"), run) as journal:
        results = reproduce(scale, flags.jobs, journal, kept, only)
        lines = (f"{json.dumps(name)}: {json.dumps(part)}" for name, part in results.items())
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    paper_page.write(results, flags.out)


def reproduce(
    scale: Scale,
    jobs: int,
    journal: Journal,
    kept: Mapping[str, Any] | None = None,
    only: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Every experiment, for every seed; the same for any number of processes, and with a `journal` of any length. With
    `only`, these policies are measured and the figures of the others are those that were `kept`."""
    units = [(case, seed) for case in cases(scale) for seed in range(1, scale.seeds + 1)]
    owed = [(case, seed) for case, seed in units if case.unit(seed) not in journal]
    wanted = [replace(case, policies=tuple(p for p in case.policies if only is None or p in only)) for case, _ in owed]
    with pool(jobs) as workers:
        measured = workers.map(_measure, wanted, (seed for _, seed in owed))
        shown = track(
            measured, "Simulating", len(units), len(units) - len(owed), console=Console(stderr=True), transient=True
        )
        for (case, seed), figures in zip(owed, shown, strict=True):
            journal.add(case.unit(seed), figures)
    code = [*(kept or {}).get("code", ()), code_digest(_code())[:16]]  # with `only`, that of what was kept, too
    results: dict[str, Any] = {"settings": settings(scale), "code": list(dict.fromkeys(code))}
    for case, seed in units:
        done = journal[case.unit(seed)]
        cell = results.setdefault(case.experiment, {}).setdefault(case.row, {}).setdefault(case.column, {})
        for policy in case.policies:
            if policy not in done:
                cell[policy] = (kept or {})[case.experiment][case.row][case.column][policy]
                continue
            for name, figure in done[policy].items():
                cell.setdefault(policy, {}).setdefault(name, []).append(float(f"{figure:.6g}"))
    return results


def _code() -> Iterator[Path]:
    """All that figures depend on; the page does not."""
    for package in (core, sim):
        yield from (path for path in Path(*package.__path__).rglob("*.py") if path.name != "paper_page.py")


def settings(scale: Scale) -> dict[str, Any]:
    return {
        "scale": asdict(scale),
        "sigma": Synthetic().sigma,
        "draft_len": DRAFT_LEN,
        "costs": asdict(SimFleet().costs),
        "kinds": {name: dict(kind) for name, kind in KINDS.items()},
        "reference_load": REFERENCE_LOAD,
        "readings": READINGS,
        "versions": {"laps-sd": version("laps-sd"), "python": ".".join(platform.python_version_tuple()[:2])},
    }


def cases(scale: Scale) -> Iterator[Case]:
    everybody = (*BASES, *READINGS.values(), *OTHERS)
    for kind in (*MIX, "mix"):
        for load in scale.loads:
            yield Case("loads", kind, f"{load:g}", Synthetic(scale.requests, load, kind=kind), 1, everybody)
    for row, kind in (("plain", ""), ("thinking", "thinking")):
        plain = Synthetic(scale.requests, REFERENCE_LOAD, kind=kind)
        yield Case("tails", row, f"{REFERENCE_LOAD:g}", plain, 1, (*BASES, *READINGS.values(), "gittins", "oracle"))
    for kind in (*MIX, "mix"):
        for sigma in SIGMAS:
            noisy = Synthetic(scale.requests, REFERENCE_LOAD, sigma=sigma, kind=kind)
            yield Case("errors", kind, f"{sigma:g}", noisy, 1, ("laps-sd",))
    mixed = Synthetic(scale.requests, REFERENCE_LOAD, kind="mix")
    variants = [f"laps-sd:{name}={value}" for name, values in ABLATIONS.items() for value in values]
    yield Case("ablations", "mix", f"{REFERENCE_LOAD:g}", mixed, 1, (*BASES, "laps-sd", *variants))
    for slots in scale.slots:
        for load in scale.loads:
            what = Synthetic(scale.requests_at(slots), load, kind="mix")
            yield Case("map", str(slots), f"{load:g}", what, slots, MAPPED)


def _measure(case: Case, seed: int) -> dict[str, dict[str, float]]:
    """Figures by policy: seconds, or of the errors of estimates."""
    fleet = SimFleet(case.slots, draft_len=DRAFT_LEN)
    if not case.policies:
        return {}
    if case.experiment != "errors":
        timed = one_seed(case.policies, fleet, case.workload, (), seed)
        return {policy: {"mean_s": mean / 1e3, "p99_s": p99 / 1e3} for policy, (mean, p99) in timed.items()}
    jobs = generate(case.workload, seed, fleet)
    errors = sorted(estimation_errors(jobs, fleet))
    figures = {"mean": sum(errors) / max(1, len(errors)), "median": percentile(errors, 0.5)}
    return {"laps-sd": {**figures, "perceptible": len(errors) / len(jobs)}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched(LapsSd):
    """`laps-sd` that notes how far its estimate is off, relative to the truth, when a request becomes perceptible."""

    rounds: Callable[[str], int]  # the true number of rounds of a request in all, by its id
    errors: dict[str, float] = field(default_factory=dict)

    def claim(self, view: View, round_s: float) -> Claim:
        claim = LapsSd.claim(self, view, round_s)
        id = view.request.id
        if view.perceptible and id not in self.errors:
            true_s = self.rounds(id) * round_s + view.prefill_s
            self.errors[id] = abs(claim.key - true_s) / true_s  # its key is the estimated total
        return claim


def estimation_errors(jobs: Sequence[Job], fleet: SimFleet) -> list[float]:
    """|estimated - true| / true nominal seconds of those `jobs` that become perceptible, at the moment when they do."""
    watched = Watched(rounds={job.id: job.rounds(fleet.reference_draft) for job in jobs}.__getitem__)
    Plain(jobs, watched, fleet).run()  # the lean loop reckons a claim only if somebody waits
    return list(watched.errors.values())


if __name__ == "__main__":
    main()
