"""A flood in virtual time (`python -m tests.simulator.flood`): long enough for a p99 to mean something."""

import json
from typing import Annotated

import typer

from scheduler_service.core.policies import make_policy
from scheduler_service.core.types import Bounds
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.generate import Synthetic, generate
from scheduler_service.sim.results import percentile
from scheduler_service.sim.simulator import Simulation, Trace
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job
from tests.scheduler.test_admission import AUTO, after

BUSY, FLOOD = 4000, 12_000  # requests at 0.9 of the capacity, and at ten times of it
LEARN = 500  # that come at 0.9 before the flood
SLOTS = 4


def run(policy: str, seed: int, bounds: Bounds = AUTO) -> dict[str, object]:
    fleet = SimFleet(slots=SLOTS, plan_lag=1, prefill_chunk=256, costs=StepCosts())

    def jobs(load: float, count: int, seed: int) -> list[Job]:
        what = Synthetic(requests=count, load=load, output_mean=30)
        return generate(what, seed, fleet)

    def simulated(all: list[Job], among: list[Job]) -> tuple[Trace, dict[str, float]]:
        trace, ids = Simulation(all, make_policy(policy), fleet, bounds=bounds).run(), {job.id for job in among}
        done = [one for one in trace.outcomes if one.job.id in ids]
        e2el, ttft = [one.latency_s for one in done], [one.first_token_s - one.job.arrival_s for one in done]
        p99 = {"e2el_p99_s": percentile(sorted(e2el), 0.99), "ttft_p99_s": percentile(sorted(ttft), 0.99)}
        return trace, {"mean_s": sum(e2el) / len(e2el), **p99}

    busy = jobs(0.9, BUSY, seed)
    flood = after(busy[:LEARN], jobs(10, FLOOD, seed + 1))
    (calm, normal), (wild, flooded) = simulated(busy, busy), simulated(flood, flood[LEARN:])
    ratio = {name: round(flooded[name] / normal[name], 2) for name in ("e2el_p99_s", "ttft_p99_s")}
    refused = {"refused_at_0.9": len(calm.refused), "refused_in_flood": len(wild.refused)}
    return {"policy": policy, "seed": seed, "at_0.9": normal, "flood": flooded, "ratio": ratio, **refused}


def main(
    policies: Annotated[str, typer.Option(help="With commas between.")] = "fcfs,gittins",
    seeds: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    for seed in range(1, seeds + 1):
        for policy in policies.split(","):
            print(json.dumps(run(policy, seed)), flush=True)  # noqa: T201


if __name__ == "__main__":
    typer.run(main)
