"""What Prometheus sees of a drafter. All of it is read from the model's thread's tally and from the sessions."""

from collections.abc import Callable

from protos.metrics import PREFIX, Families, loop_lag
from worker_service.drafting.tally import Tally


class Metrics(Families):
    """Before `serve` the model is still being loaded."""

    def __init__(self, prefix: str = PREFIX) -> None:
        super().__init__(prefix, lambda: self._name)
        self._name, self._tally, self._blocks = "", Tally(), 1
        self._sessions: Callable[[], int] = lambda: 0
        self.lag = loop_lag(self)

        def used() -> float:
            return 1 - self._tally.free_blocks / self._blocks if self._name else 0.0

        self.gauge("drafter_sessions", "Workers that it drafts for", lambda: float(self._sessions()))
        self.gauge("drafter_texts", "Texts that it continues", lambda: float(self._tally.texts))
        self.gauge("drafter_kv_usage_perc", "Share of its KV memory that is in use, from 0 to 1", used)
        self.counter("drafter_passes", "Passes of its model", lambda: float(self._tally.passes))
        self.counter("drafter_pass_seconds", "Time in passes", lambda: self._tally.busy_s)
        self.counter("drafter_guesses", "Tokens guessed, those of branches too", lambda: float(self._tally.guesses))
        text = "Tokens of texts computed, or again"
        self.counter("drafter_caught_up_tokens", text, lambda: float(self._tally.caught_up))
        self.sent = self.counts("drafter_sent_tokens", "Guessed tokens that were sent to workers")
        self.refused = self.counts(
            "drafter_sessions_refused", "Sessions that were refused or cut off, by status", "status"
        )

    def serve(self, model: str, tally: Tally, blocks: int, sessions: Callable[[], int]) -> None:
        """The model is loaded."""
        self._name, self._tally, self._blocks, self._sessions = model, tally, blocks, sessions
