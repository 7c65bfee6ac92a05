"""How much is live in each class: requests, tokens, and the work that is believed to remain; and how fast it is done.

Work is counted in request-rounds and in prompt tokens to be computed; seconds come from the workers' present costs and
from the measured pace. Decides nothing: core/admission.py does.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from scheduler_service.core.costs import CostProfile
from scheduler_service.core.entry import Entry, Worker
from scheduler_service.core.events import StepDone
from scheduler_service.core.types import RequestClass

HALF_LIFE_S = 30.0  # of what is known about the pace
SOME = 128  # requests over which means are taken: few enough to follow what is asked for


@dataclass(slots=True)
class Sum:
    requests: int = 0
    tokens: int = 0  # reserved: of prompt and output, as many as they may come to
    rounds: int = 0  # request-rounds of decoding still to come, as believed
    prefill: int = 0  # tokens to be computed before they can draft


class Pace(NamedTuple):
    """Seconds in which all workers together do a request-round, and compute a token of prompt."""

    round_s: float
    prefill_s: float

    def work_s(self, rounds: float, prefill: float) -> float:
        return rounds * self.round_s + prefill * self.prefill_s


class Load:
    def __init__(self) -> None:
        self.by_class = {klass: Sum() for klass in RequestClass}
        self.mean_rounds = self.mean_prefill = 0.0  # of the work of the last requests that came
        self._came = 0
        self._nominal: Pace | None = None  # of all workers, by their costs
        self._nominal_s = self._elapsed_s = 1.0  # by the costs, and by the clock, of rounds with no slot vacant

    def reserve(self, entry: Entry, rounds: int) -> None:
        """It is live from now on. `rounds`: as in `update`."""
        request = entry.request
        of_class = self.by_class[request.klass]
        of_class.requests += 1
        of_class.tokens += request.most_tokens
        self._came = min(self._came + 1, SOME)
        self.mean_rounds += (rounds - self.mean_rounds) / self._came
        self.mean_prefill += (entry.prefill_owed - self.mean_prefill) / self._came
        self.update(entry, rounds)

    def update(self, entry: Entry, rounds: int) -> None:
        """What remains of it now. `rounds`: request-rounds, as believed."""
        prefill = entry.prefill_owed
        if rounds != entry.rounds_counted or prefill != entry.prefill_counted:
            of_class = self.by_class[entry.request.klass]
            of_class.rounds += rounds - entry.rounds_counted
            of_class.prefill += prefill - entry.prefill_counted
            entry.rounds_counted, entry.prefill_counted = rounds, prefill

    def release(self, entry: Entry) -> None:
        """It is live no longer."""
        of_class = self.by_class[entry.request.klass]
        of_class.requests -= 1
        of_class.tokens -= entry.request.most_tokens
        of_class.rounds -= entry.rounds_counted
        of_class.prefill -= entry.prefill_counted

    # ---- how fast work gets done ----

    def step_done(self, worker: Worker, step: StepDone, draft_len: int, now: float) -> None:
        """Compare clock and costs over a round between two reports, if no slot was vacant."""
        running = len(worker.running) if step.partial else sum([not row.skipped for row in step.rounds])
        decoding = sum([len(row.each) or 1 for row in step.rounds if row.new])
        prefilled = sum([row.prefilled for row in step.rounds])
        self.rounds_done(worker, (now,), running, decoding, prefilled, draft_len)

    def rounds_done(
        self, worker: Worker, ends: Iterable[float], running: int, decoding: int, prefilled: int, draft_len: int
    ) -> None:
        """Rounds of the worker ended then. In each of them so many requests ran and decoded, and so many tokens of
        prompts were computed."""
        slots, cost = worker.up.slots, worker.up.cost
        if running < slots:
            worker.full_at = None
            return
        nominal_s = decoding * cost.round_s(draft_len, slots) / slots + prefilled * cost.prefill_token_s
        for ended_s in ends:
            if worker.full_at is not None:
                elapsed_s = max(0.0, ended_s - worker.full_at)
                fade = 0.5 ** (elapsed_s / HALF_LIFE_S)
                self._nominal_s = self._nominal_s * fade + nominal_s
                self._elapsed_s = self._elapsed_s * fade + elapsed_s
            worker.full_at = ended_s

    @property
    def speed(self) -> float:
        """Nominal seconds of work done in a second, while no slot is vacant: 1 if the costs tell the truth."""
        return min(max(self._nominal_s / max(self._elapsed_s, 1e-9), 0.01), 100.0)

    def staff(self, workers: Iterable[Worker], draft_len: int) -> None:
        """Work is done by these from now on, at these costs."""
        costs = [(worker.up.cost, worker.up.slots) for worker in workers]
        rounds_per_s = sum(slots / cost.round_s(draft_len, slots) for cost, slots in costs)
        self._nominal = Pace(1 / rounds_per_s, _together_s(cost for cost, _ in costs)) if costs else None

    @property
    def pace(self) -> Pace | None:
        """None: there are no workers."""
        if self._nominal is None:
            return None
        return Pace(self._nominal.round_s / self.speed, self._nominal.prefill_s / self.speed)


def _together_s(costs: Iterable[CostProfile]) -> float:
    seconds = [cost.prefill_token_s for cost in costs]
    return 1 / sum(1 / each for each in seconds) if all(seconds) else 0.0
