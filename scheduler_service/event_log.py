"""A log of every event, with its time, and of every plan, as JSON lines; and a replay that rebuilds each plan exactly.
It is for finding mistakes: nothing is recovered from it."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from pydantic import TypeAdapter

from scheduler_service.core.beliefs import FleetAcceptance, FleetLength
from scheduler_service.core.core import Core
from scheduler_service.core.fairness import Terms
from scheduler_service.core.types import (
    Bounds,
    Cancelled,
    CostChanged,
    Draining,
    Event,
    Obeyed,
    Plan,
    Record,
    StepDone,
    Submitted,
    Tick,
    WorkerDown,
    WorkerUp,
)

_KINDS: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(kind)
    for kind in (Submitted, Cancelled, WorkerUp, WorkerDown, StepDone, CostChanged, Draining, Obeyed, Tick)
}
_LENGTH = TypeAdapter(FleetLength)
_ACCEPTANCE = TypeAdapter(FleetAcceptance)
_BOUNDS = TypeAdapter(Bounds)
_TERMS = TypeAdapter(dict[str, Terms])
_PLAN = TypeAdapter(Plan)
_RECORD = TypeAdapter(Record)


class EventLog:
    """One line is written for each event. Lines are never forced to the disk."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", buffering=1)

    def leading(self, core: Core) -> None:
        """A leader begins with what was learned before. The log may hold several leaders, one after the other."""
        known = core.fleet.known
        length, acceptance = _LENGTH.dump_python(known.length), _ACCEPTANCE.dump_python(known.acceptance)
        self._write(
            length=length,
            acceptance=acceptance,
            bounds=_BOUNDS.dump_python(core.fleet.bounds),
            few_plans=core.fleet.few_plans,
        )

    def terms(self, terms: Mapping[str, Terms]) -> None:
        """The terms of tenants from now on."""
        self._write(terms=_TERMS.dump_python(dict(terms)))

    def restored(self, record: Record) -> None:
        self._write(restored=_RECORD.dump_python(record, mode="json"))

    def event(self, now: float, event: Event) -> None:
        kind = type(event).__name__
        self._write(now=now, kind=kind, event=_KINDS[kind].dump_python(event, mode="json"))

    def plan(self, worker: str, plan: Plan) -> None:
        self._write(worker=worker, plan=_PLAN.dump_python(plan, mode="json"))

    def _write(self, **line: object) -> None:
        if not self._file.closed:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """What a stream still does while it ends is not written."""
        self._file.close()


def replay(path: Path, make_core: Callable[[], Core]) -> Iterator[tuple[str, Plan, Plan]]:
    """Feed the log to a new core for each leader. Yields worker, plan as logged, plan as rebuilt."""
    core = make_core()
    with path.open() as lines:
        for line in map(json.loads, lines):
            if "length" in line:
                core = make_core()
                core.fleet.known.length = _LENGTH.validate_python(line["length"])
                core.fleet.known.acceptance = _ACCEPTANCE.validate_python(line["acceptance"])
                core.fleet.bounds = _BOUNDS.validate_python(line["bounds"])
                core.fleet.few_plans = line.get("few_plans", False)
            elif "terms" in line:
                core.fleet.tenants.terms = _TERMS.validate_python(line["terms"])
            elif "restored" in line:
                core.restore([_RECORD.validate_python(line["restored"], strict=False)])
            elif "event" in line:
                core.observe(_KINDS[line["kind"]].validate_python(line["event"], strict=False), line["now"])
            else:
                yield line["worker"], _PLAN.validate_python(line["plan"], strict=False), core.plan(line["worker"])
