"""A log of every event, with its time, and of every plan, as JSON lines; and a replay that rebuilds each plan exactly.
It is for finding mistakes: nothing is recovered from it."""

import json
import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import structlog
from pydantic import TypeAdapter

from scheduler_service.core.beliefs import FleetAcceptance, FleetLength
from scheduler_service.core.core import Core
from scheduler_service.core.events import (
    Cancelled,
    CostChanged,
    Draining,
    Event,
    Obeyed,
    StepDone,
    Submitted,
    Tick,
    WorkerDown,
    WorkerUp,
)
from scheduler_service.core.probed import FleetProbe
from scheduler_service.core.terms import Terms
from scheduler_service.core.types import Bounds, Plan, Record

_KINDS: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(kind)
    for kind in (Submitted, Cancelled, WorkerUp, WorkerDown, StepDone, CostChanged, Draining, Obeyed, Tick)
}
_LENGTH = TypeAdapter(FleetLength)
_ACCEPTANCE = TypeAdapter(FleetAcceptance)
_PROBE = TypeAdapter(FleetProbe)
_BOUNDS = TypeAdapter(Bounds)
_TERMS = TypeAdapter(dict[str, Terms])
_PLAN = TypeAdapter(Plan)
_RECORD = TypeAdapter(Record)
_SETTINGS = ("few_plans", "plans_lag", "ready_first")  # of a Fleet


MOST_WAITING = 4096  # lines; then whoever has more waits for the disk: a replay needs all of them
CLOSE_S = 10.0  # for what waits to be written
STALLED_S = 10.0  # the log ends when nothing was written for so long while somebody waited

Line = Callable[[], dict[str, object]]  # data that nobody changes, still to be put into words


class EventLog:
    """One line is written for each event, by a thread of its own. Lines are never forced to the disk. If a line can no
    longer be written the log ends there, and the service goes on."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._file = path.open("a")
        self._lines: queue.Queue[Line | None] = queue.Queue(MOST_WAITING)
        self._open = True
        self._writer = Thread(target=self._write_all, name="event-log", daemon=True)
        self._writer.start()

    def leading(self, core: Core) -> None:
        """A leader begins with what was learned before. The log may hold several leaders, one after the other. One that
        tries again to take over begins with the requests and the terms that it has already."""
        known = core.fleet.known
        length, acceptance = _LENGTH.dump_python(known.length), _ACCEPTANCE.dump_python(known.acceptance)
        bounds, probe = _BOUNDS.dump_python(core.fleet.bounds), _PROBE.dump_python(known.probe)
        line = {"length": length, "acceptance": acceptance, "bounds": bounds, "probe": probe}
        line |= {name: getattr(core.fleet, name) for name in _SETTINGS}
        self._put(lambda: line)
        if terms := core.fleet.tenants.terms:
            self.terms(terms)
        for entry in core.fleet.entries.values():
            self.restored(entry.record())

    def forgot(self) -> None:
        """The leader forgot what was learned."""
        self._put(lambda: {"forgot": True})

    def terms(self, terms: Mapping[str, Terms]) -> None:
        """The terms of tenants from now on."""
        line: dict[str, object] = {"terms": _TERMS.dump_python(dict(terms))}
        self._put(lambda: line)

    def restored(self, record: Record) -> None:
        self._put(lambda: {"restored": _RECORD.dump_python(record, mode="json")})

    def event(self, now: float, event: Event) -> None:
        kind = type(event).__name__
        self._put(lambda: {"now": now, "kind": kind, "event": _KINDS[kind].dump_python(event, mode="json")})

    def plan(self, worker: str, plan: Plan) -> None:
        self._put(lambda: {"worker": worker, "plan": _PLAN.dump_python(plan, mode="json")})

    def close(self) -> None:
        """Returns when all is written. What a stream still does while it ends is not written."""
        if self._writer.is_alive():
            self._open = False
            with suppress(queue.Full):
                self._lines.put(None, timeout=CLOSE_S)
            self._writer.join(CLOSE_S)

    def _put(self, line: Line) -> None:
        if self._open:
            try:
                self._lines.put(line, timeout=STALLED_S)
            except queue.Full:
                self._end(f"nothing was written for {STALLED_S:.0f} s")

    def _write_all(self) -> None:
        try:
            with self._file:
                while (line := self._lines.get()) is not None:
                    self._file.write(json.dumps(line(), separators=(",", ":")) + "\n")
                    if self._lines.empty():
                        self._file.flush()
        except Exception as error:  # whatever it is: without this thread the event loop would wait for room for ever
            self._end(str(error) or type(error).__name__)
            while self._lines.get() is not None:  # somebody may be waiting for room
                pass

    def _end(self, reason: str) -> None:
        structlog.get_logger().error("event_log_ended", reason=reason)
        self._open = False


def replay(path: Path, make_core: Callable[[], Core]) -> Iterator[tuple[str, Plan, Plan]]:
    """Feed the log to a new core for each leader. Yields worker, plan as logged, plan as rebuilt."""
    core = make_core()
    with path.open() as lines:
        for line in map(json.loads, lines):
            if "length" in line:
                core = make_core()
                core.fleet.known.length = _LENGTH.validate_python(line["length"])
                core.fleet.known.acceptance = _ACCEPTANCE.validate_python(line["acceptance"])
                core.fleet.known.probe = _PROBE.validate_python(line.get("probe", {}))
                core.fleet.bounds = _BOUNDS.validate_python(line["bounds"])
                for name in _SETTINGS:
                    setattr(core.fleet, name, line.get(name, False))
            elif "forgot" in line:
                core.fleet.forget()
            elif "terms" in line:
                core.fleet.tenants.terms = _TERMS.validate_python(line["terms"])
            elif "restored" in line:
                core.restore([_RECORD.validate_python(line["restored"], strict=False)])
            elif "event" in line:
                core.observe(_KINDS[line["kind"]].validate_python(line["event"], strict=False), line["now"])
            else:
                yield line["worker"], _PLAN.validate_python(line["plan"], strict=False), core.plan(line["worker"])
