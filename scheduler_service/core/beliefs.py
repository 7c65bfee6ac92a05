"""What is believed of a request: its acceptance rate and its output length. Never what is decided from it."""

from dataclasses import dataclass

MAX_WINDOW = 32  # rounds of history kept for the stability test


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Accepted / drafted of one request, weighted by drafted tokens, with the running mean of its last rounds."""

    drafted: int = 0
    accepted: int = 0
    means: tuple[float, ...] = ()  # the running mean after each of the last MAX_WINDOW rounds

    @property
    def mean(self) -> float:
        """In [0, 1]; 0 before anything was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def after(self, drafted: int, accepted: int) -> "Acceptance":
        """The belief after one more round. A round without drafts is no sample, yet counts as a round."""
        total, hits = self.drafted + drafted, self.accepted + accepted
        mean = hits / total if total else 0.0
        return Acceptance(total, hits, (*self.means, mean)[-MAX_WINDOW:])

    def stable(self, window: int, epsilon: float) -> bool:
        """Whether the running mean moved by at most `epsilon` over the last `window` rounds (LAPS-SD, Algorithm 1)."""
        recent = self.means[-window:]
        return len(recent) == window and max(recent) - min(recent) <= epsilon


@dataclass(slots=True)
class FleetLength:
    """Output length before anything better is known: the running mean of finished requests."""

    finished: int = 0
    tokens: int = 0

    def observe(self, tokens: int) -> None:
        self.finished += 1
        self.tokens += tokens

    def predict(self, hint: int | None, max_tokens: int) -> int:
        """A client's hint, else the mean of finished requests, else max_tokens; always in [1, max_tokens]."""
        guess = hint if hint is not None else round(self.tokens / self.finished) if self.finished else max_tokens
        return max(1, min(guess, max_tokens))
