"""What the requests were that ended in the last minutes, so that other policies can be tried on them. It is bounded,
lives in memory alone, and nothing decides by it."""

from collections import deque
from dataclasses import dataclass

from scheduler_service.core.types import Record
from scheduler_service.round_log import RoundLog
from scheduler_service.sim.workload import Job

KEPT_S = 600.0  # since their end
MOST_REQUESTS = 256
MOST_TOKENS = 100_000  # of output, of all of them: so the rounds take some megabytes at most
LOGPROBS_WEIGHT = 64  # stored with its log-probabilities a token takes up to as many times the memory


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that ran to its end. `log`: its durable rounds; the last ones may become durable a little later."""

    record: Record
    ended_s: float
    log: RoundLog
    weight: int

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.record.request.arrival

    def job(self, draft_len: int) -> Job:
        """As a simulation takes it. `draft_len`: tokens that a round drafts at most."""
        request, shapes = self.record.request, self.log.shapes()
        return Job(
            id=request.id,
            arrival_s=request.arrival,
            prompt_tokens=request.prompt_tokens,
            output_tokens=max(1, self.record.emitted),
            accepted=tuple(accepted for _, _, accepted in shapes),
            draft_len=max([draft_len, *(drafted for _, drafted, _ in shapes)]),
            predicted_output_tokens=request.predicted_tokens,
            klass=request.klass,
            tenant=request.tenant,
            drafted=tuple(drafted for _, drafted, _ in shapes),
            max_tokens=request.max_tokens,
            expected=request.expected,
        )


class History:
    def __init__(self) -> None:
        self._ended: deque[EndedRequest] = deque()
        self._weight = 0

    def add(self, record: Record, now: float, log: RoundLog, *, logprobs: bool, scores: int = 0) -> None:
        """This request has run to its end. `logprobs`: whether they are stored with its tokens; `scores`: how many are
        stored of its prompt."""
        weight = record.emitted * (LOGPROBS_WEIGHT if logprobs else 1) + scores
        self._ended.append(EndedRequest(record, now, log, weight))
        self._weight += weight
        while len(self._ended) > MOST_REQUESTS or self._weight > MOST_TOKENS:
            self._forget_oldest()

    def since(self, now: float) -> list[EndedRequest]:
        """Those that ended in the last KEPT_S, the first one first; all others are forgotten."""
        while self._ended and self._ended[0].ended_s < now - KEPT_S:
            self._forget_oldest()
        return list(self._ended)

    def forget(self) -> None:
        """All of them."""
        self._ended.clear()
        self._weight = 0

    def _forget_oldest(self) -> None:
        self._weight -= self._ended.popleft().weight
