"""What Prometheus sees of a worker: its steps, its KV memory, and how its drafts are accepted. All of it is read from
the runner's tally."""

from collections import Counter
from collections.abc import Callable

from protos.metrics import PREFIX, Families, Reading, loop_lag
from worker_service.tally import Tally, reached


class Metrics(Families):
    """Before `serve` the model is still being loaded."""

    def __init__(self, prefix: str = PREFIX) -> None:
        super().__init__(prefix, lambda: self._name)
        self._name, self._tally = "", Tally()
        self._blocks: Callable[[], int] = lambda: 1
        self.lag = loop_lag(self)

        def used() -> float:
            free = self._tally.free_blocks
            return 0.0 if free is None else 1 - free / self._blocks()

        self.gauge("kv_cache_usage_perc", "Share of the KV memory that is in use, from 0 to 1", used)
        self.gauge("step_requests", "Requests that ran in the last step", lambda: float(self._tally.running))
        self.counter("steps", "Steps that ran", lambda: float(self._tally.steps))
        text = "Time in steps, by phase; idle: between them, with work but without a command that allows it"
        self.counter("step_seconds", text, lambda: self._tally.seconds._asdict(), "phase")
        text = "The longest that a step waited for drafts from elsewhere"
        self.gauge("step_longest_wait_seconds", text, lambda: self._tally.longest_wait_s)
        self.counter("step_tokens", "Output tokens", lambda: float(self._tally.tokens))
        self.counter(
            "step_prefilled_tokens", "Tokens computed of prompts, or again", lambda: float(self._tally.prefilled)
        )
        self._drafts()

    def _drafts(self) -> None:
        def drafts() -> float:
            return float(self._tally.drafted.total() - self._tally.drafted[0])

        self.counter("spec_decode_num_drafts", "Rounds of a request that drafted", drafts)
        self.counter("spec_decode_num_draft_tokens", "Drafted tokens", lambda: _tokens(self._tally.drafted))
        text = "Drafted tokens that the target agreed with"
        self.counter("spec_decode_num_accepted_tokens", text, lambda: _tokens(self._tally.accepted))
        text = "Drafted tokens that a drafter of another process made"
        self.counter("spec_decode_num_remote_draft_tokens", text, lambda: float(self._tally.apart[0]))
        text = "Drafted tokens that a drafter of another process made, and that the target agreed with"
        self.counter("spec_decode_num_remote_accepted_tokens", text, lambda: float(self._tally.apart[1]))
        text, label = "Drafted tokens, by position in the draft, from 0", "position"
        self.counter("spec_decode_num_draft_tokens_per_pos", text, lambda: _per_pos(self._tally.drafted), label)
        text = "Drafted tokens that the target agreed with, by position in the draft, from 0"
        self.counter("spec_decode_num_accepted_tokens_per_pos", text, lambda: _per_pos(self._tally.accepted), label)

    def serve(self, model: str, tally: Tally, blocks: Callable[[], int]) -> None:
        """The model is loaded, and its runner counts there. `blocks`: of KV, in all, asked once a step has run."""
        self._name, self._tally, self._blocks = model, tally, blocks


def _tokens(rounds: Counter[int]) -> float:
    return float(sum(tokens * number for tokens, number in rounds.copy().items()))


def _per_pos(rounds: Counter[int]) -> Reading:
    return {str(position): float(number) for position, number in enumerate(reached(rounds.copy()))}
