"""Short ways to make jobs and fleets in tests: a round lasts a second, and nothing else costs anything."""

from scheduler_service.core.policies import Policy
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.oracle import parts, simulated_policy
from scheduler_service.sim.simulator import Trace, simulate
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job

SECOND = StepCosts(t_draft_ms=0, t_verify_ms=1000, t_verify_slope=0, t_prefill_ms_per_token=0)
NAMES = ["fcfs", "sjf", "srpt-length", "las", "mlfq", "gsa", "gittins", "laps-sd"]


def job(id: str, arrival_s: float = 0.0, tokens: int = 10, accepted: tuple[int, ...] = (0,), **more: object) -> Job:
    """One token a round unless `accepted` says more."""
    return Job(id, arrival_s, more.pop("prompt_tokens", 1), tokens, accepted, **more)  # type: ignore[arg-type]


def policy(name: str, jobs: list[Job], draft_len: int = 4) -> Policy:
    return simulated_policy(*parts(name), jobs, draft_len)


def run(jobs: list[Job], name: str = "fcfs", **fleet: object) -> Trace:
    return simulate(jobs, policy(name, jobs), SimFleet(**{"costs": SECOND} | fleet))  # type: ignore[arg-type]


def ends(trace: Trace) -> dict[str, float]:
    return {outcome.job.id: round(outcome.end_s, 9) for outcome in trace.outcomes}
