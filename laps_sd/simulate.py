"""`laps-sd simulate`: reads flags, writes table, JSON and report. The simulator itself is scheduler_service/sim."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laps_sd import machine, terminal
from laps_sd.draft_len import parse_draft_len
from scheduler_service.predictor import PredictorKind, lacks, make_predictor
from scheduler_service.sim.costs import StepCosts
from worker_service.outputs import writable

if TYPE_CHECKING:  # imported where it is used: `--help` needs none of it
    from rich.progress import Progress, TaskID

    from scheduler_service.core.policies import Policy
    from scheduler_service.sim.simulator import Trace
    from scheduler_service.sim.worker import SimFleet
    from scheduler_service.sim.workload import Job

SYNTHETIC = "synthetic"
MOST_MS = 1e6  # for each --t-... flag


def simulate(
    workload: Annotated[
        str, typer.Option(metavar="FILE", help="JSON Lines or CSV; or synthetic[:name=value,...] for a generated one.")
    ],
    policy: Annotated[
        str,
        typer.Option(metavar="P,P,...", help="Each a name, or name:setting=value:... ; `oracle` knows true lengths."),
    ] = "fcfs,sjf,las,laps-sd",
    policy_set: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="For every policy that has the setting; repeatable."),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, max=4096, help="Requests that a worker runs in one round.")] = 1,
    workers: Annotated[int, typer.Option(min=1, max=4096, help="Of each cell.")] = 1,
    cells: Annotated[
        int, typer.Option(min=1, max=1000, help="Over 1: a service of cells, under the first policy.")
    ] = 1,
    route: Annotated[str, typer.Option(metavar="R,R,...", help="Between cells: p2c, affinity, hash, random.")] = "p2c",
    view_lag_s: Annotated[float, typer.Option(min=0, max=3600, help="How old is what gateways know of a cell.")] = 0.3,
    kill_cell: Annotated[str | None, typer.Option(metavar="CELL@SECOND", help="It dies then.")] = None,
    down_s: Annotated[float, typer.Option(min=0, help="How long that cell is down.")] = 10.0,
    hot_tenant: Annotated[float, typer.Option(min=0, max=1, help="Share of the requests that one tenant sends.")] = 0.0,
    ideal: Annotated[bool, typer.Option("--ideal", help="One cell with the workers of all cells, too.")] = False,
    processes: Annotated[int, typer.Option(min=1, max=256, help="That share the cells.")] = 2,
    draft_len: Annotated[
        str, typer.Option(metavar="N|auto", help="Tokens proposed per round; auto: as many as pay.")
    ] = "4",
    t_draft_ms: Annotated[float, typer.Option(min=0, help="Per draft token.")] = StepCosts().t_draft_ms,
    t_verify_ms: Annotated[
        float, typer.Option(min=0.001, help="Verification of one request.")
    ] = StepCosts().t_verify_ms,
    t_verify_slope: Annotated[
        float, typer.Option(min=0, help="Its share that each further request adds.")
    ] = StepCosts().t_verify_slope,
    t_token_ms: Annotated[float, typer.Option(min=0, help="Per verified token.")] = StepCosts().t_token_ms,
    t_prefill_ms_per_token: Annotated[float, typer.Option(min=0)] = StepCosts().t_prefill_ms_per_token,
    t_resume_ms: Annotated[float, typer.Option(min=0, help="Per request that goes on after a pause.")] = 0.0,
    t_offload_ms_per_token: Annotated[float, typer.Option(min=0, help="KV to the host's memory and back.")] = 0.0,
    t_link_ms: Annotated[float, typer.Option(min=0, help="Between two stages of the target, for each pass.")] = 0.0,
    stages: Annotated[int, typer.Option(min=1, max=256, help="That the target is spread over, by layers.")] = 1,
    drafts_elsewhere: Annotated[
        str | None,
        typer.Option(metavar="NAME=VALUE,...", help="Drafts come from another machine: rtt_ms=1,ready_first=true."),
    ] = None,
    kv_budget_tokens: Annotated[int | None, typer.Option(min=1, help="Per worker; default: unbounded.")] = None,
    host_kv_tokens: Annotated[int, typer.Option(min=0, help="KV that a worker can offload, not drop.")] = 0,
    prefill_chunk: Annotated[int | None, typer.Option(min=1, help="Prompt tokens a round; default: all.")] = None,
    predictor: Annotated[
        PredictorKind,
        typer.Option(help="For requests without predicted_output_tokens: learned from ended requests, or none."),
    ] = PredictorKind.ONLINE,
    plan_lag: Annotated[int, typer.Option(min=0, max=1, help="1: plans see a step late, as live.")] = 0,
    seed: Annotated[int, typer.Option(help="Of all random draws.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", callback=writable)] = None,
    html_file: Annotated[Path | None, typer.Option("--html", metavar="FILE", callback=writable)] = None,
) -> None:
    """Compare policies on a workload, under a virtual clock."""
    from laps_sd.loadtest.results import without_times
    from scheduler_service.core.draft import LONGEST
    from scheduler_service.sim.drafter import parse_apart
    from scheduler_service.sim.results import summarise
    from scheduler_service.sim.worker import MOST_DRAFTS, UNBOUNDED, SimFleet
    from scheduler_service.sim.workload import MOST_DRAFT, WorkloadError

    costs = StepCosts(
        *(t_draft_ms, t_verify_ms, t_verify_slope, t_token_ms, t_prefill_ms_per_token),
        *(t_resume_ms, t_offload_ms_per_token, (stages - 1) * t_link_ms),
    )
    if not all(time_ms <= MOST_MS for time_ms in asdict(costs).values()):
        raise typer.BadParameter(f"must be at most {MOST_MS:g}", param_hint="--t-...")
    try:
        draft = parse_draft_len(draft_len, MOST_DRAFT)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--draft-len") from None
    try:
        apart = None if drafts_elsewhere is None else parse_apart(drafts_elsewhere)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--drafts-elsewhere") from None
    if missing := lacks(predictor):
        raise typer.BadParameter(missing, param_hint="--predictor")
    fleet = SimFleet(
        slots=slots,
        workers=workers,
        draft_len=draft,
        costs=costs,
        kv_budget_tokens=kv_budget_tokens or UNBOUNDED,
        plan_lag=plan_lag,
        prefill_chunk=prefill_chunk or UNBOUNDED,
        host_kv_tokens=host_kv_tokens,
        most_drafts=LONGEST if stages > 1 else MOST_DRAFTS,
        apart=apart,
    )
    try:
        jobs = _jobs(workload, replace(fleet, workers=workers * cells), seed)
    except WorkloadError as error:
        raise typer.BadParameter(str(error), param_hint="--workload") from None
    try:
        policies = _policies(policy, policy_set or [], jobs, fleet.reference_draft)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--policy") from None
    if cells == 1 and (kill_cell or hot_tenant or ideal):
        raise typer.BadParameter("need --cells over 1", param_hint="--kill-cell, --hot-tenant, --ideal")
    if cells > 1:
        from laps_sd import simulate_cells as several
        from scheduler_service.sim.cells import CellSettings
        from scheduler_service.sim.oracle import SIMULATED

        if html_file or any(text.partition(":")[0] in SIMULATED for text in policies):
            what = " and ".join(SIMULATED)
            raise typer.BadParameter(f"goes with neither --html nor the policies {what}", param_hint="--cells")
        first = next(iter(policies.values()))
        try:
            kill, routes = several.parse_kill(kill_cell, cells, down_s), several.parse_routes(route)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--kill-cell, --route") from None
        chosen = CellSettings(
            cells, fleet, first, predictor, view_lag_s=view_lag_s, kill=kill, processes=processes, seed=seed
        )
        rows = several.run(several.with_tenants(jobs, hot_tenant, seed), chosen, routes, ideal=ideal)
        several.print_rows(rows)
        if json_file:
            json_file.write_text(json.dumps({"routes": rows, "workload": workload, "cells": cells}, indent=1) + "\n")
        return
    if html_file:
        with terminal.importing_report():
            from scheduler_service.sim.report import render
    began = time.process_time()
    traces = _run(jobs, policies, fleet, predictor)
    took_s = time.process_time() - began
    told = results = {name: summarise(trace) for name, trace in traces.items()}
    if not all(row["completed"] for row in results.values()):
        typer.echo("laps-sd: no request ended: the memory of a worker is too small for any of them", err=True)
        told = {name: without_times(row) for name, row in told.items()}
    _print(told)
    rounds = sum(trace.rounds for trace in traces.values())
    typer.echo(f"{rounds:,} request-rounds, {rounds / max(took_s, 1e-9):,.0f} per second of this processor", err=True)
    if json_file:
        settings = asdict(fleet) | {"seed": seed, "workload": workload, "predictor": predictor}
        body = {"policies": told, "settings": settings}
        json_file.write_text(json.dumps(body, indent=1) + "\n")
    if html_file:
        about = {
            "model": "none: a worker with given costs",
            "policies": ", ".join(results),
            "workload": workload,
        }
        html_file.write_text(render(about | machine.facts(), results, traces), encoding="utf-8")


def _jobs(workload: str, fleet: "SimFleet", seed: int) -> "Sequence[Job]":
    from scheduler_service.sim.generate import generate, parse_synthetic, with_acceptance
    from scheduler_service.sim.workload import read_workload

    kind, _, settings = workload.partition(":")
    if kind == SYNTHETIC:
        return generate(parse_synthetic(settings), seed, fleet)
    jobs = read_workload(Path(workload), note=partial(typer.echo, err=True))
    return with_acceptance(jobs, max(1, fleet.reference_draft), seed)


def _policies(names: str, settings: Sequence[str], jobs: "Sequence[Job]", draft_len: int) -> "dict[str, Policy]":
    """The policies, by the text that named each. Raises ValueError."""
    from scheduler_service.core.policies import find_policy
    from scheduler_service.guarded import guarded
    from scheduler_service.sim.oracle import SIMULATED, simulated_policy

    policies: dict[str, Policy] = {}
    used: set[str] = set()
    for text in filter(None, (part.strip() for part in names.split(","))):
        name, *own = text.split(":")
        known = set() if name in SIMULATED else {field.name for field in fields(find_policy(name))}
        shared = [setting for setting in settings if setting.partition("=")[0].strip().replace("-", "_") in known]
        used |= set(shared)
        made = simulated_policy(name, [*shared, *own], jobs, draft_len)
        policies[text] = made if name in SIMULATED else guarded(made)
    if unused := [setting for setting in settings if setting not in used]:
        raise ValueError(f"policy-set: {unused[0]!r} is not name=value with a setting of any of {names}")
    if not policies:
        raise ValueError("policy: name at least one")
    return policies


def _run(
    jobs: "Sequence[Job]", policies: "dict[str, Policy]", fleet: "SimFleet", predictor: PredictorKind
) -> "dict[str, Trace]":
    """Runs each policy with its own predictor, which learns only from the requests that ended under that policy."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from scheduler_service.sim.simulator import simulate as run

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    traces: dict[str, Trace] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        for name, policy in policies.items():
            task = bar.add_task(name, total=len(jobs))
            progress = partial(_advance, bar, task)
            traces[name] = run(jobs, policy, fleet, progress, make_predictor(predictor) if policy.asks else None)
    return traces


def _advance(bar: "Progress", task: "TaskID", ended: int) -> None:
    bar.update(task, completed=ended)


# Columns of the table: what is never left out has rank 0 (tables.py).
_RANKS = {
    "policy": 0,
    "ended": 7,
    "failed": 8,
    "mean s": 0,
    "rel.": 1,
    "median s": 9,
    "p99 s": 2,
    "ttft s": 10,
    "ttft p99": 3,
    "pause p99": 4,
    "in time": 5,
    "paused": 6,
}


def _print(results: Mapping[str, Mapping[str, Any]]) -> None:
    """A time that nobody has is None."""
    from laps_sd.tables import Column, FittedTable

    first = next(iter(results.values()))["mean_e2el_ms"] or 1.0

    def seconds(time_ms: float | None) -> str:
        return "-" if time_ms is None else f"{time_ms / 1e3:.2f}"

    rows = [
        (
            name,
            f"{row['completed']:.0f}",
            f"{row['failed']:.0f}",
            seconds(row["mean_e2el_ms"]),
            "-" if row["mean_e2el_ms"] is None else f"{row['mean_e2el_ms'] / first:.3f}",
            *(seconds(row[name]) for name in ("median_e2el_ms", "p99_e2el_ms", "mean_ttft_ms", "p99_ttft_ms")),
            seconds(row["p99_pause_ms"]),
            f"{row['good_share']:.1%}",
            f"{row['preemptions_per_request']:.2f}",
        )
        for name, row in results.items()
    ]
    table = FittedTable([Column(title, rank, left=title == "policy") for title, rank in _RANKS.items()], rows)
    terminal.console().print(table)
