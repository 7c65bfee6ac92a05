"""The connections of workers, and which worker has which request. No transport lives here, and no decision."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from protos.link.v1 import worker_link_pb2 as pb
from scheduler_service.core.events import StepDone


@dataclass(slots=True, eq=False)
class WorkerSession:
    """One connection of one worker."""

    worker: str
    id: str
    sent: dict[str, int]  # the requests that the worker knows, each with the placement it was last admitted under
    report_within_s: float = 0.0  # so long reports and commands that can wait may wait; 0: not at all
    seq: int = 0
    seen_step: int = 0
    command: pb.StepCommand = field(default_factory=pb.StepCommand)  # the last one
    spares: int = 0  # requests of that command beyond the worker's slots, less those that have ended since
    stuck: bool = False  # its last round ran nothing: it waits for a command that changes something
    owed_s: float = 0.0  # how long the report of a round has been due
    told_to_drain: bool = False  # the next message says so
    leaving: bool = False  # it said goodbye, so the end of its stream is not a crash
    sent_away: bool = False  # the scheduler ends its stream: the worker has not crashed
    reported_at: float | None = None  # when the report came that the next command answers
    wake: asyncio.Event = field(default_factory=asyncio.Event)  # a command is due
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    rounds: int = 0
    forward_s: float = 0.0  # drafting and verifying
    other_s: float = 0.0
    idle_s: float = 0.0
    tokens: int = 0  # of output
    _sent_at: float = 0.0  # the last command, by the loop's clock
    _timer: asyncio.TimerHandle | None = None  # will wake it for a command that can wait

    def close(self) -> None:
        self._cancel_timer()
        self.closed.set()

    def wake_in_time(self) -> None:
        """A command is due that can wait until `report_within_s` after the last one. What is urgent sets `wake`."""
        if not self.report_within_s:
            self.wake.set()
        elif self._timer is None and not self.closed.is_set():
            self._timer = asyncio.get_running_loop().call_at(self._sent_at + self.report_within_s, self.wake.set)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def commanded(self, command: pb.StepCommand, slots: int) -> None:
        """`command` is about to be sent to the worker, which has so many slots."""
        self.spares = len(command.schedule) - slots
        if self.report_within_s:
            self._cancel_timer()
            self._sent_at = asyncio.get_running_loop().time()
        edited = command.admit or command.forget or command.drop or command.offload
        if self.stuck and (edited or command.schedule != self.command.schedule):
            self.stuck = False
        self.command = command

    def wait(self, seconds: float, max_lag: int) -> float:
        """Time has passed. Returns for how many seconds the worker has owed a report: it was told what to run, it is
        not stuck, and it is not `max_lag` rounds ahead of what its command has seen. Time does not count while a
        command is due to it: it may have nothing left to run."""
        if self.wake.is_set():
            return self.owed_s
        owes = self.command.schedule and not self.stuck and self.seen_step - self.command.seen_step < max_lag
        self.owed_s = self.owed_s + seconds if owes else 0.0
        return self.owed_s

    def count(self, report: pb.StepReport, step: StepDone) -> int:
        """Take note of a report that has rows. Returns how many requests end with it. `step`: the same for the core."""
        ended, tokens, stuck = 0, 0, not step.partial
        for row in step.rounds:
            ended += row.finish is not None
            tokens += row.new
            stuck = stuck and row.skipped
        self.rounds += max(report.step - self.seen_step, 0)
        self.seen_step = report.step
        self.stuck = stuck
        self.owed_s = 0.0
        self.spares -= ended
        self.tokens += tokens
        self.forward_s += report.draft_s + report.verify_s
        self.other_s += report.other_s + report.wait_s
        self.idle_s += report.idle_s
        return ended

    @property
    def idle_share(self) -> float:
        return self._share(self.idle_s)

    @property
    def outside_forward_share(self) -> float:
        return self._share(self.idle_s + self.other_s)

    def _share(self, part_s: float) -> float:
        whole_s = self.forward_s + self.other_s + self.idle_s
        return part_s / whole_s if whole_s else 0.0


class Sessions(dict[str, WorkerSession]):
    """The open session of each worker, by the worker's name; and for each request the session that has it."""

    def __init__(self) -> None:
        super().__init__()
        self._holders: dict[str, WorkerSession] = {}

    def open(self, session: WorkerSession) -> None:
        """`session` takes the place of an older one of the same worker."""
        if (old := self.get(session.worker)) is not None:
            self.close(old)
        self[session.worker] = session
        for id in session.sent:
            self._holders.setdefault(id, session)

    def send_away(self) -> None:
        """The scheduler is about to end all their streams, so no request is to be suspected of a crash."""
        for session in self.values():
            session.sent_away = True

    def close(self, session: WorkerSession) -> None:
        session.close()
        del self[session.worker]
        for id in session.sent:
            self._release(id, session)

    def sent(self, session: WorkerSession, placements: Iterable[tuple[str, int]]) -> None:
        """These requests were admitted there. A worker that had one of them before is woken: it has to forget it."""
        for id, placement in placements:
            holder = self._holders.get(id)
            if holder is not None and holder is not session:
                holder.wake_in_time()
            session.sent[id] = placement
            self._holders[id] = session

    def forget(self, session: WorkerSession, ids: Iterable[str]) -> list[str]:
        """Those of `ids` that the worker knows. From now on it knows them no more."""
        known = [id for id in ids if session.sent.pop(id, None) is not None]
        for id in known:
            self._release(id, session)
        return known

    def wake_holder(self, id: str) -> None:
        """Have the next command sent at once to the worker that has this request, if any has."""
        if (holder := self._holders.get(id)) is not None:
            holder.wake.set()

    def wake_all(self) -> None:
        for session in self.values():
            session.wake.set()

    def _release(self, id: str, session: WorkerSession) -> None:
        if self._holders.get(id) is session:
            del self._holders[id]
