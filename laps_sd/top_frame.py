"""What `laps-sd top` shows of one moment: the server's words, and the rates that follow from two of them. Asks nobody,
draws nothing."""

from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime, timedelta
from typing import Any

from laps_sd.client import RequestPage, Stats


@dataclass(frozen=True, slots=True)
class Frame:
    """What the server said at one moment, and what it said `seconds` earlier, from which the rates follow."""

    stats: Stats
    before: Stats | None = None
    seconds: float = 0.0
    listed: RequestPage = field(default_factory=RequestPage)

    def rate(self, counter: str, worker: str | None = None) -> float | None:
        """Growth of a counter per second, of one worker or of the service. None: not known, because this is the first
        frame, or because the server has begun to count anew."""
        now, then = _of(self.stats, worker), _of(self.before, worker)
        if now is None or then is None:
            return None
        grown: int = getattr(now, counter) - getattr(then, counter)
        return grown / self.seconds if grown >= 0 else None

    @property
    def acceptance(self) -> float | None:
        """Accepted / drafted since the last frame; if nothing was drafted since then, since the server began; None if
        nothing was ever drafted."""
        drafted, accepted = self.rate("num_draft_tokens"), self.rate("num_accepted_tokens")
        if not drafted or accepted is None:
            drafted, accepted = self.stats.num_draft_tokens, self.stats.num_accepted_tokens
        return accepted / drafted if drafted else None

    def as_dict(self) -> dict[str, Any]:
        """Stats and the listed requests by the names of the interface, times in seconds; `acceptance`; and `rates` per
        second. null: not known."""
        counters = ("submitted", "finished", "cancelled", "preemptions", "output_tokens")
        rates: dict[str, Any] = {name: self.rate(name) for name in counters}
        rates["workers"] = {
            worker.worker_id: {name: self.rate(name, worker.worker_id) for name in ("rounds", "output_tokens")}
            for worker in self.stats.workers
        }
        requests = [_plain(status) for status in self.listed.requests]
        return {**_plain(self.stats), "requests": requests, "acceptance": self.acceptance, "rates": rates}


def _of(stats: Stats | None, worker: str | None) -> Any:
    """The whole, or the part of `worker`; None if there is no such part."""
    if stats is None or worker is None:
        return stats
    return next((status for status in stats.workers if status.worker_id == worker), None)


def _plain(value: Any) -> Any:
    """As JSON has it: times in seconds, those of the clock since the Unix epoch."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, datetime):
        return value.timestamp()
    return value.total_seconds() if isinstance(value, timedelta) else value
