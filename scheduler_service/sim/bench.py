"""The laboratory's table: every policy on every kind of workload, over several seeds, on paired workloads.

`python -m scheduler_service.sim.bench --help`. It prints Markdown and draws no plots. Ratios are of mean latency, each
policy's over the first one's on the same jobs, with the half-width of a 95 % interval over the seeds (Student's t).
"""

import argparse
import gzip
import json
import math
import statistics
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from scheduler_service.predictor import PredictorKind, make_predictor
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.generate import Synthetic, at_load, generate, parse_synthetic
from scheduler_service.sim.oracle import parts, simulated_policy
from scheduler_service.sim.results import interval_95, summarise
from scheduler_service.sim.simulator import simulate
from scheduler_service.sim.worker import UNBOUNDED, SimFleet
from scheduler_service.sim.workload import MOST_DRAFT, Job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="fcfs,sjf,srpt-length,las,mlfq,laps-sd,gittins,oracle")
    parser.add_argument("--workload", action="append", help="settings of a synthetic workload; repeatable", default=[])
    parser.add_argument("--slots", default="1", help="several, comma-separated")
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--acceptance", type=Path, help="JSON Lines of real `accepted_per_step`, to draw jobs from")
    parser.add_argument("--method", default="", help="only rows of this `method`")
    parser.add_argument("--draft-len", type=draft_length, default=4)
    parser.add_argument("--t-resume-ms", type=milliseconds, default=0.0)
    parser.add_argument("--t-prefill-ms-per-token", type=milliseconds, default=StepCosts().t_prefill_ms_per_token)
    parser.add_argument("--kv-budget-tokens", type=positive, default=UNBOUNDED)
    parser.add_argument("--predictor", type=PredictorKind, default=PredictorKind.NONE, choices=list(PredictorKind))
    flags = parser.parse_args()
    policies = flags.policy.split(",")
    try:
        workloads = {text or "plain": parse_synthetic(text) for text in flags.workload or [""]}
        all_slots = [positive(text) for text in flags.slots.split(",")]
        logs = read_logs(flags.acceptance, flags.method, flags.draft_len) if flags.acceptance else []
        for text in policies:
            simulated_policy(*parts(text), [], flags.draft_len)
    except (OSError, ValueError, EOFError, zlib.error) as error:  # the last two: of what gzip does not read
        parser.error(str(error))
    print("| slots | workload | " + " | ".join(policies) + " |\n" + "|" + "---|" * (len(policies) + 2))  # noqa: T201
    costs = StepCosts(t_resume_ms=flags.t_resume_ms, t_prefill_ms_per_token=flags.t_prefill_ms_per_token)
    for slots in all_slots:
        fleet = SimFleet(slots=slots, draft_len=flags.draft_len, costs=costs, kv_budget_tokens=flags.kv_budget_tokens)
        for text, what in workloads.items():
            runs = [one_seed(policies, fleet, what, logs, seed, flags.predictor) for seed in range(1, flags.seeds + 1)]
            cells = " | ".join(
                cell([run[name] for run in runs], [run[policies[0]] for run in runs]) for name in policies
            )
            print(f"| {slots} | {text} | {cells} |", flush=True)  # noqa: T201


def one_seed(
    policies: Sequence[str],
    fleet: SimFleet,
    what: Synthetic,
    logs: Sequence[Job],
    seed: int,
    predictor: PredictorKind = PredictorKind.NONE,
) -> dict[str, tuple[float, float]]:
    """Mean and p99 latency in ms by policy, all on the same jobs."""
    jobs = at_load(list(drawn(logs, what, seed)), what, seed, fleet) if logs else generate(what, seed, fleet)
    results: dict[str, tuple[float, float]] = {}
    for text in policies:
        policy = simulated_policy(*parts(text), jobs, fleet.reference_draft)
        row = summarise(simulate(jobs, policy, fleet, predictor=make_predictor(predictor)))
        results[text] = row["mean_e2el_ms"], row["p99_e2el_ms"]
        if not row["completed"]:
            raise SystemExit(f"bench: under {text} no request ended: a worker's memory is too small for any of them")
    return results


def positive(text: str) -> int:
    """Raises ValueError."""
    if (number := int(text)) < 1:
        raise ValueError(f"{number} is not positive")
    return number


def draft_length(text: str) -> int:
    """Raises ValueError."""
    if not 0 <= (number := int(text)) <= MOST_DRAFT:
        raise ValueError(f"{number} is not from 0 to {MOST_DRAFT}")
    return number


def milliseconds(text: str) -> float:
    """Raises ValueError."""
    if not 0 <= (number := float(text)) < math.inf:
        raise ValueError(f"{number} is no time")
    return number


def read_logs(path: Path, method: str, draft_len: int) -> list[Job]:
    """Jobs of measured acceptance; `accepted_per_step` counts emitted tokens, one more than were accepted. Raises
    ValueError and OSError."""
    jobs: list[Job] = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for line, row in enumerate(map(json.loads, file), 1):
            steps = row.get("accepted_per_step") if isinstance(row, dict) else None
            if not isinstance(steps, list) or not all(isinstance(step, int) and step >= 1 for step in steps):
                raise ValueError(f"{path.name}:{line}: accepted_per_step: must be a list of whole numbers from 1")
            if steps and method in ("", row.get("method")):
                accepted = tuple(min(draft_len, emitted - 1) for emitted in steps)
                jobs.append(Job(str(line), 0.0, 100, sum(accepted) + len(accepted), accepted, draft_len))
    if not jobs:
        raise ValueError(f"{path.name}: holds no log of method {method!r}")
    return jobs


def drawn(logs: Sequence[Job], what: Synthetic, seed: int) -> Iterator[Job]:
    """As many jobs as asked for, of random logs, with predictions that err by sigma or are those of another log."""
    rng = Random(f"logs {seed}")
    for index in range(what.requests):
        job = rng.choice(logs)
        other = rng.choice(logs).output_tokens
        guess = other if math.isinf(what.sigma) else job.output_tokens * math.exp(what.sigma * rng.gauss(0, 1))
        yield replace(job, id=f"{index:07d}", predicted_output_tokens=max(1, round(guess)))


def cell(values: Sequence[tuple[float, float]], bases: Sequence[tuple[float, float]]) -> str:
    """Mean ratio of mean latency to the base's, its interval, and the same ratio of p99."""
    ratios = [value[0] / base[0] for value, base in zip(values, bases, strict=True)]
    tails = [value[1] / base[1] for value, base in zip(values, bases, strict=True)]
    mean, half = interval_95(ratios)
    return f"{mean:.3f} ±{half:.3f} (p99 {statistics.fmean(tails):.2f})"


if __name__ == "__main__":
    main()
