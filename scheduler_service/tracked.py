"""One request as the scheduler's shell knows it: its durable part, and its part on the way to the store. The set of all
requests is in ledger.py; no message is sent here."""

from dataclasses import dataclass, field

from protos.idempotence import content
from protos.link.v1 import gateway_link_pb2 as pb
from scheduler_service.core.types import Record
from scheduler_service.outbox import GatewayOutbox
from scheduler_service.round_log import RoundLog
from scheduler_service.store import Write
from scheduler_service.store.fields import caught_up
from scheduler_service.store.rounds import LoggedRound


@dataclass(slots=True)
class Tracked:
    """A request that is live or ended just now. `record`, `log` and `ending` are durable; `written`, the last record
    handed to the store, `output` and `rounds` run ahead of them."""

    submit: pb.Submit
    record: Record
    written: Record = field(init=False)
    output: list[int] = field(default_factory=list)
    rounds: list[tuple[LoggedRound, bytes]] = field(default_factory=list)  # on their way to the store, and as stored
    log: RoundLog = field(default_factory=RoundLog)
    ending: bytes | None = None
    ended_s: float = 0.0  # when that became durable, by the ledger's own time
    stored: bool = False  # its first write is durable
    model: str = ""  # as in store.Write
    # The gateways that want its output. False: one that is behind, and follows again when it has room.
    followers: dict[GatewayOutbox, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.written = self.record

    def whole(self) -> Write:
        """All that is durable of it."""
        submit, log = content(self.submit), bytes(self.log.stored)
        record = caught_up(self.record, log)
        return Write(record, submit=submit, start=0, log=log, ending=self.ending, model=self.model)
