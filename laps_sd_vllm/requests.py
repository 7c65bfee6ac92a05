"""Requests that vLLM has, and those that ended in the last minutes: what they were, and what each of their rounds did.
Nothing is decided here, and nothing of vLLM is imported."""

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from laps_sd_vllm.steps import StepRow
from scheduler_service.core.types import Request
from scheduler_service.predictor.window import Row
from scheduler_service.sim.workload import Job

KEPT_S = 600.0  # since their end
MOST_REQUESTS = 2048
MOST_ROUNDS = 400_000  # of all of them: a comparison takes seconds, and some megabytes
WIDTH = 8  # bits: a draft has at most 255 tokens


@dataclass(slots=True)
class Live:
    """`row`: the features that the predictor saw. Times in seconds since the epoch."""

    request: Request
    row: Row | None = None
    rounds: "array[int]" = field(default_factory=lambda: array("I"))  # drafted and accepted tokens of each
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0  # rounds in which the target disagreed with a draft
    emitted: int = 0
    last_s: float = 0.0  # when it got tokens last; 0: not yet
    pause_s: float = 0.0  # the longest time between two deliveries

    @property
    def cut(self) -> bool:
        """Whether its bound ended it."""
        return self.emitted >= self.request.max_tokens

    def ran(self, row: StepRow, now: float) -> None:
        new = len(row.tokens)
        if not new:
            return
        self.rounds.append(row.drafted << WIDTH | row.accepted)
        self.drafted += row.drafted
        self.accepted += row.accepted
        self.rejected += row.accepted < row.drafted and new > row.accepted
        self.emitted += new
        if self.last_s and now - self.last_s > self.pause_s:
            self.pause_s = now - self.last_s
        self.last_s = now


@dataclass(frozen=True, slots=True)
class Ended:
    """One that ran to its end."""

    live: Live
    ended_s: float

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.live.request.arrival

    def job(self, number: int, first_s: float, draft_len: int) -> Job:
        """As a simulation takes it, `first_s` being its beginning."""
        request, mask = self.live.request, (1 << WIDTH) - 1
        return Job(
            id=str(number),
            arrival_s=max(0.0, request.arrival - first_s),
            prompt_tokens=request.prompt_tokens,
            output_tokens=max(1, self.live.emitted),
            accepted=tuple([each & mask for each in self.live.rounds]),
            draft_len=draft_len,
            predicted_output_tokens=request.predicted_tokens,
            klass=request.klass,
            tenant=request.tenant,
            drafted=tuple([each >> WIDTH for each in self.live.rounds]),
            max_tokens=request.max_tokens,
            expected=request.expected,
        )


class Recent:
    """The requests that ended in the last KEPT_S; bounded in number and rounds."""

    def __init__(self) -> None:
        self._ended: deque[Ended] = deque()
        self._rounds = 0

    def add(self, live: Live, now: float) -> None:
        self._ended.append(Ended(live, now))
        self._rounds += len(live.rounds)
        while len(self._ended) > MOST_REQUESTS or self._rounds > MOST_ROUNDS:
            self._forget_oldest()

    def since(self, now: float) -> list[Ended]:
        """The first one first; older ones are forgotten."""
        while self._ended and self._ended[0].ended_s < now - KEPT_S:
            self._forget_oldest()
        return list(self._ended)

    def _forget_oldest(self) -> None:
        self._rounds -= len(self._ended.popleft().live.rounds)

    def __iter__(self) -> Iterator[Ended]:
        return iter(self._ended)
