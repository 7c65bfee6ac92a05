"""What `laps-sd top` shows of one moment: the server's words, and the rates that follow from two of them. Asks nobody,
draws nothing."""

from dataclasses import dataclass, field
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from protos.times import seconds
from protos.v1 import inference_pb2, status_pb2


@dataclass(frozen=True, slots=True)
class Frame:
    """What the server said at one moment, and what it said `seconds` earlier, from which the rates follow."""

    stats: status_pb2.StatsResponse
    before: status_pb2.StatsResponse | None = None
    seconds: float = 0.0
    listed: inference_pb2.ListRequestsResponse = field(default_factory=inference_pb2.ListRequestsResponse)

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


def _of(stats: status_pb2.StatsResponse | None, worker: str | None) -> Any:
    """The whole, or the part of `worker`; None if there is no such part."""
    if stats is None or worker is None:
        return stats
    return next((status for status in stats.workers if status.worker_id == worker), None)


def _plain(message: Message) -> dict[str, Any]:
    """Every field by its name: numbers as numbers, enums by name, times in seconds. protobuf's own JSON writes long
    numbers as text and leaves zeros out."""

    def value(kind: Any, given: Any) -> Any:
        if isinstance(given, Duration | Timestamp):
            return seconds(given)
        if kind.message_type:
            return _plain(given)
        return kind.enum_type.values_by_number[given].name if kind.enum_type else given

    plain: dict[str, Any] = {}
    for kind in message.DESCRIPTOR.fields:
        given = getattr(message, kind.name)
        if kind.is_repeated:
            plain[kind.name] = [value(kind, each) for each in given]
        else:
            plain[kind.name] = None if kind.has_presence and not message.HasField(kind.name) else value(kind, given)
    return plain
