"""Recorded runs in the simulator: the same requests and rounds, with the step costs that were measured. Runs nothing
live."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from laps_sd.compare.design import Run
from scheduler_service.core.core import PREFILL_CHUNK
from scheduler_service.guarded import guarded
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.fields import expectation
from scheduler_service.sim.oracle import SIMULATED, parts, simulated_policy
from scheduler_service.sim.recording import fitted
from scheduler_service.sim.results import summarise
from scheduler_service.sim.simulator import simulate
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job, write_workload

ORACLE = "oracle"


def jobs_of(run: Mapping[str, Any], draft_len: int) -> list[Job]:
    """The requests of a run as they were served, with the predictor's expectations and without texts."""
    return [
        Job(
            id=f"{index:07d}",
            arrival_s=row["due_s"],
            prompt_tokens=row["input_tokens"],
            output_tokens=row["output_tokens"],
            accepted=tuple(row["accepted"]),
            draft_len=max(1, draft_len),  # as files have it; `drafted` says that nothing was
            category=row["category"],
            drafted=tuple(row["drafted"]),
            max_tokens=row["max_tokens"],
            expected=expectation(row["expected"]) if row["expected"] else None,
        )
        for index, row in enumerate(run["requests"])
    ]


def costs_of(runs: Sequence[Mapping[str, Any]]) -> StepCosts:
    """The costs that fit the steps of all these runs best."""
    return fitted(step for run in runs for step in run["steps"])


def predicted_mean_ms(run: Mapping[str, Any], policy: str, draft_len: int, costs: StepCosts | None = None) -> float:
    """Mean latency of the requests of `run` in the simulator under `policy`. `costs`: by default those of the run's own
    steps, because near saturation steps that are 1 % slower make latencies 10 % longer."""
    fleet = fleet_of(run["run"]["slots"], costs or costs_of([run]), draft_len, run["kv_tokens"])
    return mean_ms(jobs_of(run, draft_len), policy, fleet)


def fleet_of(slots: int, costs: StepCosts, draft_len: int, kv_tokens: int) -> SimFleet:
    """The worker of a comparison, which always has one."""
    return SimFleet(
        slots=slots,
        draft_len=draft_len,
        costs=costs,
        kv_budget_tokens=kv_tokens,
        plan_lag=1,
        prefill_chunk=PREFILL_CHUNK,
    )


def fleet_of_cell(cell: Mapping[str, Any], summary: Mapping[str, Any], kv_tokens: int = 0) -> SimFleet:
    """The worker of a recorded cell. `kv_tokens`: of memory; 0: as recorded."""
    costs, draft_len = StepCosts(**cell["step_costs"]), summary["settings"]["draft_len"]
    return fleet_of(cell["slots"], costs, draft_len, kv_tokens or cell["kv_tokens"])


def mean_ms(jobs: Sequence[Job], policy: str, fleet: SimFleet) -> float:
    """Mean latency of the jobs under `policy`: `oracle`, or a name with settings behind colons."""
    name, settings = parts(policy)
    simulated = simulated_policy(name, settings, jobs, fleet.reference_draft)
    if name not in SIMULATED:
        simulated = guarded(simulated)  # as in the service whose runs it is compared with
    return summarise(simulate(jobs, simulated, fleet))["mean_e2el_ms"]


def at_steady_speed(run: Mapping[str, Any], policy: str, draft_len: int) -> float:
    """The simulator's mean latency divided by the live one, both as if the machine had been equally fast all the time.
    A difference is then the simulator's error. The run must have no failed requests."""
    steady = [row["steady_s"] for row in run["requests"]]
    requests = [row | {"due_s": arrival_s} for row, (arrival_s, _) in zip(run["requests"], steady, strict=True)]
    simulated_ms = predicted_mean_ms({**run, "requests": requests}, policy, draft_len)
    return simulated_ms / (1e3 * math.fsum(latency_s for _, latency_s in steady) / len(steady))


def write_recordings(folder: Path, runs: Iterable[Mapping[str, Any]], draft_len: int) -> None:
    """Writes a workload file for each run, for `laps-sd simulate`."""
    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        write_workload(recording_of(folder, Run.of_json(run["run"])), jobs_of(run, draft_len))


def recording_of(folder: Path, run: Run) -> Path:
    return folder / f"{run.name}.jsonl.gz"
