"""Where drafts from elsewhere pay, and where not: the tables of docs/explanation/apart.md, by one command.

`python -m scheduler_service.sim.apart [--measured FILE]`. Tokens a second over those of plain decoding. The live core
chooses all draft lengths; each row's requests all come at once, twice as many as slots under ready-first. FILE is
JSON: a list of {"what": text, "profile": NAME, "batch": n, "rtt_ms": t, "mode": NAME, "x": ratio to plain}.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from scheduler_service.core.draft import REFERENCE
from scheduler_service.core.policies import make_policy
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.drafter import Apart, fan_of
from scheduler_service.sim.generate import Synthetic, generate
from scheduler_service.sim.results import summarise
from scheduler_service.sim.simulator import simulate
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job

RTTS_MS = (0.05, 1.0, 5.0, 20.0, 50.0)  # the first: another device of the same machine
BATCHES = (1, 8, 32)
LOOKUP = 0.3  # the chance of a token looked up
# Costs of a target and a draft model beside it; 70B: assumed. `chain_ms`: of a further request that is drafted for.
PROFILES: Mapping[str, tuple[StepCosts, float]] = {
    "CPU 135M + 1.5 ms": (StepCosts(1.5, 9.3, 0.048, 0.13, 0.1), 0.1),
    "8B + 1B": (StepCosts(1.5, 8.0, 0.0026, 0.021, 0.02), 0.01),
    "70B + 1B": (StepCosts(1.5, 20.0, 0.0025, 0.05, 0.1), 0.01),
}
MODES: Mapping[str, Mapping[str, Any]] = {
    "waits": {"fan": 0},
    "guesses": {"fan": 1},  # or more, as a worker chooses
    "ready-first": {"fan": 0, "ready_first": True},  # beyond a pass it guesses, too, as a worker does
}


def fleet_of(profile: str, batch: int, apart: Apart | None) -> SimFleet:
    return SimFleet(slots=batch, draft_len=None, costs=PROFILES[profile][0], apart=apart)


def tokens_per_s(jobs: Sequence[Job], fleet: SimFleet) -> float:
    return summarise(simulate(jobs, make_policy("fcfs"), fleet))["output_throughput"]


def workload(batch: int, copies: int, tokens: int) -> list[Job]:
    """As many requests as run at once, `copies` times, all at once; lengths are equal, so that slots stay full."""
    what = Synthetic(
        requests=batch * copies, load=inf, output_mean=tokens, output_cv=0.01, alpha=0.76, alpha_strength=99
    )
    return generate(what, 1, SimFleet(draft_len=8))


def row(profile: str, batch: int, rtts_ms: Sequence[float], tokens: int) -> dict[str, float]:
    """Ratios to plain decoding: of drafting on the worker, and of each mode and round trip."""
    costs, chain_ms = PROFILES[profile]
    one, two = workload(batch, 1, tokens), workload(batch, 2, tokens)
    here = fleet_of(profile, batch, Apart(chains=0))
    plain = tokens_per_s(one, replace(here, draft_len=0))
    found = {"plain tok/s": plain, "local": tokens_per_s(one, here) / plain}
    for mode, settings in MODES.items():
        for rtt_ms in rtts_ms:
            far = rtt_ms > 1e3 * costs.step_s(0, batch, batch, 0, 0)
            fan = MODES["guesses"] if mode == "ready-first" and far else {}
            apart = Apart(rtt_ms, costs.t_draft_ms, chain_ms, 4 * batch, lookup=LOOKUP, **{**settings, **fan})
            if apart.fan:
                apart = replace(apart, fan=max(fan_of(apart.supply_ms, chain_ms, batch, REFERENCE), 1))
            jobs = two if apart.ready_first else one
            found[f"{mode} {rtt_ms:g}"] = tokens_per_s(jobs, fleet_of(profile, batch, apart)) / plain
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="append", choices=list(PROFILES), help="default: all")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--rtts-ms", default=",".join(f"{rtt:g}" for rtt in RTTS_MS))
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--measured", type=Path, help="points of real processes, to stand beside the simulated ones")
    flags = parser.parse_args()
    try:
        rtts_ms = [float(text) for text in flags.rtts_ms.split(",")]
        batches = [int(text) for text in flags.batches.split(",")]
        measured = read_measured(flags.measured) if flags.measured else []
        Apart(max(rtts_ms))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    heads = [f"{mode} {rtt:g}" for mode in MODES for rtt in rtts_ms]
    print(f"| profile, batch | plain tok/s | local | {' | '.join(heads)} |\n{'|---' * (len(heads) + 3)}|")  # noqa: T201
    for profile in flags.profile or PROFILES:
        for batch in batches:
            found = row(profile, batch, rtts_ms, flags.tokens)
            cells = " | ".join(f"{found[head]:.2f}" for head in ["local", *heads])
            print(f"| {profile}, {batch} | {found['plain tok/s']:,.0f} | {cells} |", flush=True)  # noqa: T201
    if measured:
        print("\n| measured | mode, RTT ms | measured | simulated |\n|---|---|---|---|")  # noqa: T201
    for point in measured:
        mode, rtt_ms = point["mode"], float(point["rtt_ms"])
        found = row(point["profile"], point["batch"], [rtt_ms], flags.tokens)
        simulated = found["local"] if mode == "local" else found[f"{mode} {rtt_ms:g}"]
        print(f"| {point['what']} | {mode}, {rtt_ms:g} | {point['x']:.2f} | {simulated:.2f} |")  # noqa: T201


def read_measured(path: Path) -> list[dict[str, Any]]:
    """Raises OSError and ValueError, which says what is wrong."""
    points = json.loads(path.read_text())
    if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
        raise ValueError(f"{path.name}: must be a list of objects")
    for number, point in enumerate(points, 1):
        if point.get("profile") not in PROFILES or point.get("mode") not in ("local", *MODES):
            raise ValueError(f"{path.name}: point {number}: its profile or its mode is not known")
        if not all(isinstance(point.get(name), int | float) for name in ("batch", "rtt_ms", "x")):
            raise ValueError(f"{path.name}: point {number}: batch, rtt_ms and x must be numbers")
    return points


if __name__ == "__main__":
    main()
