"""The live scheduler, on virtual time, decides as the simulator does with plan lag 1: what that measures holds here."""

from pathlib import Path

import pytest

from scheduler_service.core.core import Core
from scheduler_service.core.policies import make_policy
from scheduler_service.event_log import replay
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.generate import Synthetic, generate
from scheduler_service.sim.simulator import Simulation
from scheduler_service.sim.worker import Fleet
from scheduler_service.sim.workload import Job
from tests.scheduler.virtual import Line, Live, listen
from tests.simulator.builders import NAMES

ROOM = 10**9  # tokens of KV
CHUNK = 64  # tokens of prompt a round
FLEETS = {
    "one slot": Fleet(slots=1, kv_budget_tokens=ROOM, plan_lag=1, prefill_chunk=CHUNK),
    "three slots, little memory": Fleet(slots=3, kv_budget_tokens=500, plan_lag=1, prefill_chunk=CHUNK),
    "chosen draft lengths": Fleet(
        slots=3, kv_budget_tokens=ROOM, plan_lag=1, prefill_chunk=CHUNK, draft_len=None, costs=StepCosts(t_token_ms=1.0)
    ),
    "two workers": Fleet(slots=2, workers=2, kv_budget_tokens=ROOM, plan_lag=1, prefill_chunk=CHUNK),
    "two workers, little memory": Fleet(slots=1, workers=2, kv_budget_tokens=350, plan_lag=1, prefill_chunk=CHUNK),
}


def workload(fleet: Fleet) -> list[Job]:
    what = Synthetic(requests=100, load=0.95, output_mean=18, prompt_tokens=50)
    jobs = generate(
        what, 5, draft_len=fleet.reference_draft, costs=fleet.costs, slots=fleet.slots, workers=fleet.workers
    )
    return [job for job in jobs if fleet.can_hold(job)]


@pytest.mark.parametrize("where", FLEETS)
@pytest.mark.parametrize("policy", NAMES)
async def test_live_decides_as_the_simulator_does(policy: str, where: str) -> None:
    """Every event at the same time, every plan for the same worker and equal, every end at the same time."""
    fleet = FLEETS[where]
    jobs = workload(fleet)
    simulation = Simulation(jobs, make_policy(policy), fleet)
    simulated: list[Line] = []
    listen(simulation.core, simulated)
    trace = simulation.run()
    live = Live({job.id: job for job in jobs}, fleet)
    async with live.leading(policy=policy):
        for number in range(fleet.workers):
            await live.attach(f"w{number}")
        live.lines.clear()
        await live.run(jobs)
        assert live.lines == simulated
    assert live.gateway.ended_at == {outcome.job.id: outcome.end_s for outcome in trace.outcomes}


@pytest.mark.parametrize("policy", NAMES)
async def test_the_event_log_of_a_troubled_life_replays_to_the_same_plans(policy: str, tmp_path: Path) -> None:
    """Memory is short, one request is cancelled, one is late; a worker is lost and comes back, then the scheduler."""
    fleet = FLEETS["two workers, little memory"]
    first, second = (jobs := workload(fleet))[:30], jobs[30:50]
    path = tmp_path / "events.jsonl"
    live = Live({job.id: job for job in jobs}, fleet)
    async with live.leading(policy=policy, event_log=path):
        await live.attach("w0")
        await live.attach("w1")
        for job in first:
            await live.submit(job, deadline_s=5.0 if job is first[5] else None)
        live.gateway.cancel(first[3].id)
        await live.rounds(40)
        await live.lose("w1")
        await live.rounds(20)
        await live.attach("w1")
        await live.run(second)
    async with live.leading(policy=policy, event_log=path):
        await live.attach("w0")
        await live.run(jobs[50:60])
    plans = list(replay(path, lambda: Core(make_policy(policy), draft_len=fleet.draft_len, prefill_chunk=CHUNK)))
    assert len(plans) > 100
    assert all(logged == rebuilt for _, logged, rebuilt in plans)
