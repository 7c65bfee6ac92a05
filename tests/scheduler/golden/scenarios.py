"""The golden scenarios by name, and the digest of all that comes of one."""

import json
from hashlib import sha256
from pathlib import Path

from scheduler_service.core.types import Bounds
from scheduler_service.sim.generate import Synthetic, generate
from scheduler_service.sim.simulator import simulate
from scheduler_service.sim.worker import SimFleet
from tests.scheduler.golden import adapter
from tests.scheduler.golden.scenario import Scenario, World
from tests.simulator.builders import policy

PATH = Path(__file__).with_name("digests.json")

_POLICIES = {
    "fcfs": Scenario("fcfs"),
    "sjf": Scenario("sjf", seed=2, lag=1),
    "srpt-length": Scenario("srpt-length", seed=3, draft_len=None),
    "las": Scenario("las", seed=4, workers=3),
    "las, four rounds a quantum": Scenario("las:quantum-rounds=4", seed=5, lag=1, host_blocks=0),
    "mlfq": Scenario("mlfq", seed=6, workers=3, lag=1),
    "laps-sd": Scenario("laps-sd", seed=7),
    "laps-sd by what remains": Scenario("laps-sd:key=remaining:destination=remaining:window=4", seed=8, lag=1),
    "laps-sd that stays, with a bound": Scenario("laps-sd:destination=stay:overtaking=2:queues=4", seed=9),
    "gsa": Scenario("gsa", seed=10, draft_len=None, lag=1),
    "gittins": Scenario("gittins", seed=11),
    "gittins, tight bound": Scenario("gittins:overtaking=2", seed=12, draft_len=None, workers=3),
    "gittins, ageing": Scenario("gittins:ageing=0.5:least-spread=0.6", seed=13, lag=1),
}
_FLEETS = {
    "one slot": Scenario("gittins", seed=20, workers=1, slots=1),
    "ample memory, quiet": Scenario("gittins", seed=21, blocks=4000, mishaps=0.0, lag=1, draft_len=None),
    "memory so short that half must wait": Scenario("gittins", seed=22, blocks=40, host_blocks=8, slots=5),
    "nothing to offload to": Scenario("laps-sd", seed=23, blocks=45, host_blocks=0, slots=5, lag=1),
    "one tenant": Scenario("gittins", seed=24, tenants=("",), workers=3, draft_len=None, lag=1),
    "workers die all the time": Scenario("gittins", seed=25, workers=4, mishaps=4.0, lag=1),
    "workers die all the time, one slot": Scenario("laps-sd", seed=26, workers=3, slots=1, mishaps=4.0),
    "the default bounds": Scenario("gittins", seed=27, bounds=Bounds(80, 20_000, None)),
    "a short backlog": Scenario("fcfs", seed=28, bounds=Bounds(200, 50_000, 2.0), lag=1),
    "a long queue": Scenario(
        "gittins", seed=29, at_first=1100, tenants=("",), slots=8, blocks=400, mishaps=0.2, to_the_end=False
    ),
    "many tenants": Scenario(
        "gittins", seed=30, at_first=300, tenants=tuple(f"t{i}" for i in range(60)), workers=3, to_the_end=False
    ),
    "without drafts": Scenario("las", seed=31, draft_len=0),
}
SCENARIOS = {**_POLICIES, **_FLEETS}

_SIMULATED = {
    "simulated: gittins": ("gittins", SimFleet(slots=4, workers=2, plan_lag=1)),
    "simulated: gittins, drafts chosen": ("gittins", SimFleet(slots=4, draft_len=None, kv_budget_tokens=3000)),
    "simulated: laps-sd": ("laps-sd", SimFleet(slots=4, kv_budget_tokens=3000, plan_lag=1)),
    "simulated: mlfq, offloading": ("mlfq", SimFleet(slots=4, kv_budget_tokens=2500, host_kv_tokens=2000)),
    "simulated: fcfs": ("fcfs", SimFleet(slots=2, workers=3, prefill_chunk=64)),
}
NAMES = [*SCENARIOS, *_SIMULATED]


def lines(name: str) -> list[tuple[object, ...]]:
    return _simulated(name) if name in _SIMULATED else _played(name).lines


def digest(name: str) -> dict[str, object]:
    """`sha256` of all lines, and some counts that tell what the scenario is about."""
    if name in _SIMULATED:
        made, counts = _simulated(name), {}
    else:
        world = _played(name)
        made, counts = world.lines, world.counts
    text = "\n".join(json.dumps(line) for line in made)
    return {"sha256": sha256(text.encode()).hexdigest(), "lines": len(made), **dict(sorted(counts.items()))}


def _played(name: str) -> World:
    world = World(SCENARIOS[name])
    world.run()
    return world


def _simulated(name: str) -> list[tuple[object, ...]]:
    """How each job fared."""
    chosen, fleet = _SIMULATED[name]
    jobs = generate(Synthetic(requests=250, load=0.95, output_mean=60), 5, fleet)
    trace = simulate(jobs, policy(chosen, jobs), fleet)
    outcomes = [
        (one.job.id, f"{one.first_token_s:.9g}", f"{one.end_s:.9g}", *adapter._fields(one.record))
        for one in trace.outcomes
    ]
    return [*outcomes, ("rounds", trace.rounds, trace.drafts), ("failed", [job.id for job in trace.failed])]
