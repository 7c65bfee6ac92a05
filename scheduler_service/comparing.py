"""Answers which policy would have served the last minutes' requests how well: one simulation at a time, in a process of
low priority, kept for a while. Nobody waits for it, and nothing decides by it."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import fsum

import structlog

from protos.logs import trace
from scheduler_service.config import Settings
from scheduler_service.core.entry import Worker
from scheduler_service.core.fleet import Fleet
from scheduler_service.core.policies import policy_name
from scheduler_service.history import EndedRequest, History
from scheduler_service.sim import worker as sim
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.side_by_side import ANSWER, QUESTION, Answer, Question

COMMAND = (sys.executable, "-m", "scheduler_service.sim.side_by_side")
DEADLINE_S = 120.0  # for one comparison, the start of the process included
KEPT_S = 20.0  # so long a comparison is new
SHARE = 10  # one that takes long is made so much more rarely
LEAST = 8  # requests; fewer say nothing
OTHERS = ("fcfs", "sjf", "srpt-length", "las", "laps-sd", "gittins", "oracle")


@dataclass(frozen=True, slots=True)
class Comparison:
    """`policies`: figures by policy, `running` among them. `measured_s`: mean latency as the requests were served.
    `window_s`: from their first to their last arrival. `at`: when it was asked for, in seconds since the epoch."""

    policies: Answer
    running: str
    measured_s: float
    requests: int
    window_s: float
    at: float


class Comparing:
    """`clock`: seconds since the Unix epoch."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        history: History,
        clock: Callable[[], float],
        command: Sequence[str] = COMMAND,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.newest: Comparison | None = None
        self.problem = ""  # of the last one that was tried
        self.running = ":".join([policy_name(fleet.policy), *settings.policy_set])
        self._settings, self._fleet, self._history, self._clock = settings, fleet, history, clock
        self._command, self._deadline_s = command, deadline_s
        self._asked = asyncio.Event()
        self._old_at = 0.0  # when the last one is no longer new
        self._forgotten = 0  # times that the model has changed

    @property
    def computing(self) -> bool:
        return self._asked.is_set()

    @property
    def ended(self) -> int:
        """Requests that a comparison made now would be about."""
        return len(self._history.since(self._clock()))

    def ask(self) -> None:
        """Somebody wants to see one. A new one is made if the last was tried a while ago."""
        if self._clock() >= self._old_at and self._fleet.workers and self.ended >= LEAST:
            self._asked.set()

    def forget(self) -> None:
        """Another model is served from now on: requests and costs of the last one say nothing of it."""
        self._history.forget()
        self._forgotten += 1
        self.newest, self.problem, self._old_at = None, "", 0.0

    async def run(self) -> None:
        """Until cancelled: make the comparisons that are asked for, one at a time."""
        log = structlog.get_logger()
        while True:
            await self._asked.wait()
            began_at, forgotten = self._clock(), self._forgotten
            made, problem = self.newest, ""
            try:
                made = await self._compare()
            except (OSError, ValueError, ComparisonFailed) as error:  # a timeout is an OSError
                problem = str(error) or "the simulation took too long"
                log.warning("comparison_failed", reason=problem)
            except Exception as error:  # a mistake of ours: no reason to lead no longer
                problem = "internal error"
                log.error("comparison_failed", reason=problem, trace=trace(error))
            self._asked.clear()
            if forgotten == self._forgotten:
                now = self._clock()
                self.newest, self.problem, self._old_at = made, problem, now + max(KEPT_S, SHARE * (now - began_at))

    async def _compare(self) -> Comparison:
        """Raises ComparisonFailed, OSError, ValueError."""
        ended, at = self._history.since(self._clock()), self._clock()
        worker = next(iter(self._fleet.workers.values()), None)
        if worker is None or not ended:
            raise ComparisonFailed("no worker is attached" if ended else "nothing has ended")
        fleet = self._simulated(worker)
        policies = list(dict.fromkeys([*OTHERS, self.running]))
        question = await asyncio.to_thread(_question, ended, fleet, policies)
        answer = ANSWER.validate_json(await self._simulate(question))
        arrivals = [one.record.request.arrival for one in ended]
        return Comparison(
            policies=answer,
            running=self.running,
            measured_s=fsum(one.latency_s for one in ended) / len(ended),
            requests=len(ended),
            window_s=max(arrivals) - min(arrivals),
            at=at,
        )

    def _simulated(self, worker: Worker) -> sim.SimFleet:
        """The workers that are there, all taken to be like this one, at the costs that it measures."""
        up, settings = worker.up, self._settings
        return sim.SimFleet(
            slots=up.slots,
            workers=len(self._fleet.workers),
            draft_len=None if settings.draft_len == "auto" else min(settings.draft_len, up.max_draft),
            costs=StepCosts.of(up.cost),
            kv_budget_tokens=worker.memory_tokens,
            plan_lag=1,
            prefill_chunk=settings.prefill_chunk,
        )

    async def _simulate(self, question: bytes) -> bytes:
        """Raises ComparisonFailed, OSError."""
        pipe = asyncio.subprocess.PIPE
        # In a session of its own: Ctrl-C in a terminal is the scheduler's to act on.
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        try:
            async with asyncio.timeout(self._deadline_s):
                answer, _ = await process.communicate(question)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise ComparisonFailed(f"the simulation ended with status {process.returncode}")
        return answer


class ComparisonFailed(Exception):
    """There is no comparison this time."""


def _question(ended: Sequence[EndedRequest], fleet: sim.SimFleet, policies: list[str]) -> bytes:
    jobs = [one.job(fleet.max_draft) for one in ended]
    first = min(job.arrival_s for job in jobs)
    moved = [replace(job, id=str(number), arrival_s=job.arrival_s - first) for number, job in enumerate(jobs)]
    return QUESTION.dump_json(Question(moved, fleet, policies))
