"""The live scheduler, on virtual time, decides as the simulator does with plan lag 1: what that measures holds here."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest

from protos.link.v1 import worker_link_pb2 as worker_pb
from protos.v1.types_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_DEADLINE, FINISH_REASON_LENGTH
from scheduler_service.core.core import Core
from scheduler_service.core.events import Submitted
from scheduler_service.core.policies import make_policy
from scheduler_service.core.types import RequestClass
from scheduler_service.event_log import replay
from scheduler_service.predictor import PredictorKind, make_predictor
from scheduler_service.predictor.features import of_prompt
from scheduler_service.predictor.port import Features
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.generate import Synthetic, generate
from scheduler_service.sim.simulator import Simulation, max_tokens
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job
from tests.scheduler.virtual import Line, Live, listen
from tests.simulator.builders import NAMES

ROOM = 10**9  # tokens of KV
CHUNK = 64  # tokens of prompt a round
FLEETS = {
    "one slot": SimFleet(slots=1, kv_budget_tokens=ROOM, plan_lag=1, prefill_chunk=CHUNK),
    "three slots, little memory": SimFleet(slots=3, kv_budget_tokens=500, plan_lag=1, prefill_chunk=CHUNK),
    "chosen draft lengths": SimFleet(
        slots=3, kv_budget_tokens=ROOM, plan_lag=1, prefill_chunk=CHUNK, draft_len=None, costs=StepCosts(t_token_ms=1.0)
    ),
    "two workers": SimFleet(slots=2, workers=2, kv_budget_tokens=ROOM, plan_lag=1, prefill_chunk=CHUNK),
    "little memory, and the host's": SimFleet(
        slots=3,
        kv_budget_tokens=400,
        host_kv_tokens=300,
        plan_lag=1,
        prefill_chunk=CHUNK,
        costs=StepCosts(t_offload_ms_per_token=0.01),
    ),
    "two workers, little memory, and the host's": SimFleet(
        slots=1,
        workers=2,
        kv_budget_tokens=250,
        host_kv_tokens=500,
        plan_lag=1,
        prefill_chunk=CHUNK,
        costs=StepCosts(t_offload_ms_per_token=0.01),
    ),
    "two workers, little memory": SimFleet(slots=1, workers=2, kv_budget_tokens=350, plan_lag=1, prefill_chunk=CHUNK),
}


def workload(fleet: SimFleet, seed: int = 5, requests: int = 50) -> list[Job]:
    what = Synthetic(requests=requests, load=0.95, output_mean=18, prompt_tokens=50)
    return [job for job in generate(what, seed, fleet) if fleet.can_hold(job)]


def telling(jobs: list[Job]) -> list[Job]:
    """The same, but each prompt tells how long the output will be, to whoever learns to read it."""
    most = max_tokens(jobs)

    class Telling(Job):
        def features(self) -> Features:
            return of_prompt([1] * self.prompt_tokens, most, self.klass)

    return [
        Telling(**vars(job) | {"prompt_tokens": 3 * job.output_tokens, "predicted_output_tokens": None}) for job in jobs
    ]


def mixed(jobs: list[Job]) -> list[Job]:
    """The same, of several classes and tenants."""
    return [
        replace(job, klass=RequestClass(1 + number % 3), tenant=("acme", "zenith")[number // 3 % 2])
        for number, job in enumerate(jobs)
    ]


async def run_both(
    jobs: list[Job], policy: str, fleet: SimFleet, predictor: PredictorKind = PredictorKind.NONE
) -> list[Line]:
    """Every event at the same time, every plan for the same worker and equal, every end at the same time."""
    simulation = Simulation(jobs, make_policy(policy), fleet, predictor=make_predictor(predictor))
    simulated: list[Line] = []
    listen(simulation.core, simulated)
    trace = simulation.run()
    live = Live({job.id: job for job in jobs}, fleet)
    async with live.leading(policy=policy, predictor=predictor):
        for number in range(fleet.workers):
            await live.attach(f"w{number}")
        live.lines.clear()
        await live.run(jobs)
        assert live.lines == simulated
    assert live.gateway.ended_at == {outcome.job.id: outcome.end_s for outcome in trace.outcomes}
    return simulated


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("where", FLEETS)
@pytest.mark.parametrize("policy", NAMES)
async def test_live_decides_as_the_simulator_does(policy: str, where: str, seed: int) -> None:
    await run_both(workload(FLEETS[where], seed, requests=40), policy, FLEETS[where])


@pytest.mark.parametrize("where", ["one slot", "two workers, little memory"])
async def test_live_decides_as_the_simulator_does_among_classes_and_tenants(where: str) -> None:
    await run_both(mixed(workload(FLEETS[where], requests=60)), "gittins", FLEETS[where])


@pytest.mark.parametrize("policy", [name for name in NAMES if make_policy(name).asks])
async def test_live_learns_and_decides_as_the_simulator_does(policy: str) -> None:
    fleet = FLEETS["one slot"]
    lines = await run_both(telling(workload(fleet, requests=80)), policy, fleet, predictor=PredictorKind.ONLINE)
    expected = [what.request.expected for _, _, what in lines if isinstance(what, Submitted)]
    assert sum(one is not None and one.length is not None for one in expected) > 10


@pytest.mark.parametrize("policy", NAMES)
async def test_the_event_log_of_a_troubled_life_replays_to_the_same_plans(policy: str, tmp_path: Path) -> None:
    """Memory is short, a worker gets slower, is lost and comes back, then the scheduler; what was learned and expected
    goes on."""
    fleet = FLEETS["two workers, little memory"]
    jobs = mixed([job for job in telling(workload(fleet, requests=100)) if fleet.can_hold(job)])
    path = tmp_path / "events.jsonl"
    live = Live({job.id: job for job in jobs}, fleet)
    (tenants := tmp_path / "tenants").write_text("acme weight=3\n")
    settings = {"policy": policy, "predictor": PredictorKind.ONLINE, "event_log": path, "tenants": tenants}
    async with live.leading(**settings):
        await live.attach("w0")
        await live.attach("w1")
        await live.run(jobs[:40])
        for job in jobs[40:60]:
            await live.submit(job, timeout_s=0.5 if job is jobs[49] else None)
        live.gateway.cancel(jobs[48].id)
        await live.rounds(20)
        live.workers["w0"].cost = worker_pb.CostProfile(draft_s=0.01, verify_s=0.05, prefill_token_s=0.001)
        await live.rounds(20)
        await live.tick()
        assert set(live.gateway.reasons) == {FINISH_REASON_LENGTH, FINISH_REASON_CANCELLED, FINISH_REASON_DEADLINE}
        await live.lose("w1")
        await live.rounds(20)
        await live.attach("w1")
        await live.rounds(20)
        assert live.leader.core.fleet.entries
    async with live.leading(**settings):
        await live.attach("w0")
        await live.run(jobs[60:])
    plans = list(replay(path, lambda: Core(make_policy(policy), draft_len=fleet.draft_len, prefill_chunk=CHUNK)))
    assert len(plans) > 100
    assert all(logged == rebuilt for _, logged, rebuilt in plans)


async def test_no_step_leaves_reference_cycles_behind() -> None:
    """Else the scheduler, which hardly ever has Python search for them, would grow."""
    jobs = workload(FLEETS["two workers, little memory"], requests=20)
    live = Live({job.id: job for job in jobs}, FLEETS["two workers, little memory"])
    async with live.leading(policy="gittins"):
        await live.attach("w0")
        await live.attach("w1")
        gc.collect()
        gc.disable()
        try:
            await live.run(jobs)
            assert gc.collect() == 0
        finally:
            gc.enable()
