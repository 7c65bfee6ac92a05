"""How long a decision takes: the core folds a report and plans the next round, with many requests waiting.

`python -m scheduler_service.sim.decision --help`. It alone in this package reads a clock, that of the processor: it
measures this machine, and simulates only so that the core meets reports, endings and arrivals as they come in service.
"""

import argparse
import gc
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from time import process_time

from scheduler_service.core.core import Core
from scheduler_service.core.events import Submitted
from scheduler_service.core.policies import Policy, make_policy
from scheduler_service.core.types import Ended
from scheduler_service.sim.generate import Synthetic, generate
from scheduler_service.sim.oracle import parts
from scheduler_service.sim.results import percentile
from scheduler_service.sim.simulator import max_tokens
from scheduler_service.sim.worker import SimFleet, SimWorker
from scheduler_service.sim.workload import Job

WARM_UP = 100  # decisions that are not counted: tables are made, slots fill
GOALS_MS = {10_000: 1.0, 100_000: 1.5}  # of p99


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="laps-sd,gittins")
    parser.add_argument("--waiting", default="10000,100000", help="several, comma-separated")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--decisions", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--without-gc", action="store_true", help="Python's collector of cycles off: whose maxima are they?"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    flags = parser.parse_args()
    try:
        policies = {text: make_policy(*parts(text)) for text in flags.policy.split(",")}
        everywhere = [int(text) for text in flags.waiting.split(",")]
        if min(*everywhere, flags.slots, flags.decisions) < 1:
            raise ValueError("--waiting, --slots and --decisions must be at least 1")
    except ValueError as error:
        parser.error(str(error))
    if flags.without_gc:
        gc.disable()
    results: dict[str, dict[str, dict[str, float]]] = {}
    print("| policy | waiting | p50 ms | p99 ms | max ms | goal, p99 |\n|---|---|---|---|---|---|")  # noqa: T201
    for name, policy in policies.items():
        for waiting in everywhere:
            times = sorted(decisions(policy, waiting, flags.slots, flags.decisions, flags.seed))
            row = {f"p{share}_ms": 1e3 * percentile(times, share / 100) for share in (50, 99)}
            row["max_ms"] = 1e3 * times[-1]
            results.setdefault(name, {})[str(waiting)] = row
            figures = " | ".join(f"{value:.2f}" for value in row.values())
            print(f"| {name} | {waiting:,} | {figures} | {GOALS_MS.get(waiting, '')} |", flush=True)  # noqa: T201
    if flags.json:
        settings = {"slots": flags.slots, "decisions": flags.decisions, "seed": flags.seed, "gc": gc.isenabled()}
        settings |= {"cores": os.cpu_count() or 1, "load_average": round(os.getloadavg()[0], 1)}
        flags.json.write_text(json.dumps({"policies": results, "settings": settings}, indent=1) + "\n")


def decisions(policy: Policy, waiting: int, slots: int, steps: int, seed: int) -> list[float]:
    """Processor seconds of each of `steps` decisions. Requests that end are replaced: `waiting` always wait."""
    fleet = SimFleet(slots=slots)
    drawn = generate(Synthetic(requests=2000), seed, fleet)
    most_tokens = max_tokens(drawn)
    arrivals = _endless(drawn)
    jobs: dict[str, Job] = {}
    core = Core(policy, draft_len=fleet.draft_len)
    worker = SimWorker("w", core, jobs, fleet)
    core.observe(fleet.worker_up("w"), 0.0)
    times: list[float] = []
    now = 0.0

    def submit(number: int) -> None:
        for job in islice(arrivals, number):
            jobs[job.id] = job
            core.observe(Submitted(job.request(most_tokens)), now)

    submit(waiting + slots)
    plan = core.plan("w")
    while len(times) < steps + WARM_UP:
        worker.obey(plan)
        step = worker.step()
        if step is None:
            raise RuntimeError("nothing can run")
        now += step.duration_s
        began = process_time()
        effects = core.observe(step, now)
        plan = core.plan("w")
        times.append(process_time() - began)
        submit(sum(isinstance(effect, Ended) for effect in effects))
    return times[WARM_UP:]


def _endless(drawn: Sequence[Job]) -> Iterator[Job]:
    """The same jobs over and over, as requests of their own."""
    for number in count():
        yield replace(drawn[number % len(drawn)], id=f"{number:09d}", arrival_s=0.001 * number)


if __name__ == "__main__":
    main()
