"""What the choice of draft lengths is worth: chosen ones beside fixed ones, on the same jobs, over several seeds.

`python -m scheduler_service.sim.drafts --help`. It prints Markdown. Ratios are of mean latency over that of the first
column, with the half-width of a 95 % interval over the seeds; loads count in rounds of `REFERENCE` drafts throughout.
"""

import argparse
from dataclasses import replace

from scheduler_service.core.draft import REFERENCE
from scheduler_service.sim.bench import cell
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.generate import Synthetic, generate, parse_synthetic
from scheduler_service.sim.oracle import simulated_policy
from scheduler_service.sim.results import summarise
from scheduler_service.sim.simulator import simulate
from scheduler_service.sim.worker import SimFleet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", default="4,0,1,2,8,auto", help="tokens a round, comma-separated")
    parser.add_argument("--workload", default="", help="settings of a synthetic workload")
    parser.add_argument("--policy", default="gittins")
    parser.add_argument("--slots", default="1,8,32", help="several, comma-separated")
    parser.add_argument("--t-token-ms", default="0,0.5,1.5", help="per verified token; several, comma-separated")
    parser.add_argument("--seeds", type=int, default=4)
    flags = parser.parse_args()
    drafts = [None if text == "auto" else int(text) for text in flags.drafts.split(",")]
    what = parse_synthetic(flags.workload)
    print(f"| t_token ms | slots | {' | '.join(flags.drafts.split(','))} |\n{'|---' * (len(drafts) + 2)}|")  # noqa: T201
    for t_token_ms in map(float, flags.t_token_ms.split(",")):
        for slots in map(int, flags.slots.split(",")):
            fleets = [
                SimFleet(slots=slots, draft_len=draft, costs=StepCosts(t_token_ms=t_token_ms)) for draft in drafts
            ]
            runs = [one_seed(flags.policy, fleets, what, seed) for seed in range(1, flags.seeds + 1)]
            cells = [cell(column, [run[0] for run in runs]) for column in zip(*runs, strict=True)]
            print(f"| {t_token_ms:g} | {slots} | {' | '.join(cells)} |", flush=True)  # noqa: T201


def one_seed(policy: str, fleets: list[SimFleet], what: Synthetic, seed: int) -> list[tuple[float, float]]:
    """Mean and p99 latency in ms on each of `fleets`, all on the same jobs."""
    jobs = generate(what, seed, replace(fleets[0], draft_len=REFERENCE))
    rows = [summarise(simulate(jobs, simulated_policy(policy, [], jobs, REFERENCE), fleet)) for fleet in fleets]
    return [(row["mean_e2el_ms"], row["p99_e2el_ms"]) for row in rows]


if __name__ == "__main__":
    main()
