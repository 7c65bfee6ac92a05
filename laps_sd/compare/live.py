"""One run on the live stack: services as `laps-sd up` starts them, requests as `laps-sd loadtest` sends them. Compares
nothing."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from laps_sd.client import AsyncClient, RequestError, Stats, Worker
from laps_sd.compare.host import Conditions, watched
from laps_sd.compare.pace import MOST_LATE_S, MOST_LATE_SHARE, latest_s
from laps_sd.loadtest import drivers
from laps_sd.loadtest.plan import Planned
from laps_sd.loadtest.record import Record
from laps_sd.loadtest.results import summarise
from laps_sd.loadtest.show import Bar
from laps_sd.loadtest.target import Refused, Server
from laps_sd.options import Options
from laps_sd.ports import StackError
from laps_sd.serve import run_stack
from laps_sd.stack import Stack
from scheduler_service.predictor.window import WINDOW
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.fields import expected_row
from scheduler_service.sim.recording import Recording, Seen, explained_lengths, fitted, read_events

TIMEOUT_S = 7200.0  # of a request; in a burst the last one waits for all others
WARM_UP_TOKENS = 8
LEARNING_S, POLL_S = 120.0, 0.2
FITTED = 0.5  # share of what the predictor remembers; it is fitted first after 32 requests, and again after as many


class Interrupted(Exception):
    """A signal ended the run; the stack is down."""


class Untaught(Exception):
    """The predictor did not learn from its lesson."""


@dataclass(slots=True)
class Measured:
    """One run's results. `stats`: the server's, at its end. `cold`: the predictor had learned nothing at its start.
    `learned`: it had learned from all this at the end."""

    records: list[Record]
    stats: Stats
    conditions: Conditions
    recording: Recording
    cold: bool
    learned: bool = False


def teach(options: Options, lesson: Sequence[Planned], folder: Path, log: Path) -> Measured:
    """Lets a new service answer `lesson`. What its predictor learns stays in `folder`, the data folder of Redis. Raises
    Untaught."""
    folder.mkdir(parents=True)
    measured = _measure(replace(options, data_dir=folder), lesson, lesson, 4 * options.slots, log)
    if not measured.learned:
        raise Untaught(f"the predictor did not learn from {len(lesson)} answers within {LEARNING_S:.0f} s")
    return measured


def measure(options: Options, plan: Sequence[Planned], lesson: Sequence[Planned], taught: Path, log: Path) -> Measured:
    """Sends `plan` to a new service that starts with a copy of `taught`, which `teach` has made of `lesson`."""
    with tempfile.TemporaryDirectory(prefix="redis-", dir=taught.parent) as data:
        shutil.copytree(taught, data, dirs_exist_ok=True)
        return _measure(replace(options, data_dir=Path(data)), plan, lesson, None, log)


def _measure(
    options: Options, plan: Sequence[Planned], lesson: Sequence[Planned], concurrency: int | None, log: Path
) -> Measured:
    """Raises Interrupted; typer.Exit if the stack does not come up, after a message on stderr."""
    measured: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="events-", dir=log.parent) as scratch, log.open("ab", buffering=0) as lines:
        events = Path(scratch, "events.jsonl")

        async def use(stack: Stack) -> None:
            try:
                measured.append(await _used(stack, options, plan, lesson, concurrency))
            except (Refused, RequestError) as error:
                raise StackError(f"{error}; {log} has more") from error

        # In a burst all requests are live at once, with those that warm up.
        most = len(plan) + len(lesson)
        options = replace(options, event_log=events, max_requests=most, grpc_port=0, http_port=0)
        if not run_stack(options, use, emit=lines.write):
            raise Interrupted
        measured[0].recording = read_events(events)
    return measured[0]


async def _used(
    stack: Stack, options: Options, plan: Sequence[Planned], lesson: Sequence[Planned], concurrency: int | None
) -> Measured:
    """Without what the scheduler writes down. Raises Refused, RequestError."""
    await stack.ready()
    server = Server(stack.grpc, timeout_s=TIMEOUT_S)
    await drivers.run(server, warm_up(lesson, options.slots))
    async with stack.client() as client:
        cold = (await client.stats()).predictor.state != "warm"
        with Bar(len(plan)) as bar:
            async with watched() as conditions:
                records, _ = await drivers.run(server, plan, concurrency=concurrency, watch=bar.watch)
        measured = Measured(records, await client.stats(), conditions, Recording(), cold)
        if cold:  # these answers were its lesson
            measured.learned = await learned(client)
    return measured


async def learned(client: AsyncClient) -> bool:
    """Returns when the predictor has been fitted to half of the ended requests, or after LEARNING_S: whether it was. It
    is fitted while the service runs, not after it ended."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LEARNING_S):
            predictor = (await client.stats()).predictor
            while predictor.trained_on < FITTED * min(predictor.finished, WINDOW):
                await asyncio.sleep(POLL_S)
                predictor = (await client.stats()).predictor
            return True
    return False


def warm_up(lesson: Sequence[Planned], slots: int) -> list[Planned]:
    """A few requests with short answers, so that what a process does only once is done before the run."""
    return [replace(planned, due_s=0.0, max_tokens=WARM_UP_TOKENS, stop=()) for planned in lesson[: 2 * slots]]


def faults(measured: Measured, pace: StepCosts | None = None) -> list[str]:
    """Reasons why the figures are not those of the policy alone."""
    results = summarise(measured.records, {}, ours=True)
    return [
        *measured.conditions.faults(),
        *_run_faults(results),
        *_pace_faults(measured, pace, results["mean_e2el_ms"] / 1e3),
        *(["the predictor had forgotten what it was taught"] if measured.cold else []),
        *(["the worker was away at the end"] if not measured.stats.workers else []),
        *(["the worker was lost while requests were served"] if _lost(measured) else []),
        *(["the scheduler did not see all of it: a service died"] if _unseen(measured) else []),
    ]


def _lost(measured: Measured) -> bool:
    """Whether the worker, or its connection, died between the first arrival and the last end."""
    seen = _seen(measured)
    began_s = min((each.arrived_s for each in seen), default=0.0)
    ended_s = max((each.ended_s for each in seen), default=0.0)
    return any(began_s < at < ended_s for at in measured.recording.lost_s)


def _seen(measured: Measured) -> list[Seen]:
    """The requests of the run as the scheduler saw them; those of the warm-up are left out."""
    requests = measured.recording.requests
    return [requests[record.request_id] for record in measured.records if record.request_id in requests]


def _unseen(measured: Measured) -> bool:
    """Whether an answer is missing in the scheduler's log, or has another number of tokens there."""
    requests = measured.recording.requests
    told = [(record.output_tokens, requests.get(record.request_id)) for record in measured.records if record.completed]
    return any(seen is None or seen.output_tokens != tokens for tokens, seen in told)


def _run_faults(results: dict[str, Any]) -> Iterator[str]:
    if results["failed"]:
        words = ", ".join(f"{count} {name}" for name, count in results["errors"].items())
        yield f"{results['failed']} requests failed: {words}"
    if not results["kept_up"]:
        yield f"the driver fell behind its schedule, by {results['p99_send_lateness_ms']:.0f} ms at the p99"


def _latest_s(measured: Measured, pace: StepCosts | None) -> float | None:
    """How late a step was at most, of those since the first request. The warm-up's do not count."""
    if pace is None:
        return None
    began_s = min((each.arrived_s for each in _seen(measured)), default=0.0)
    return latest_s(pace, measured.recording, began_s)


def _pace_faults(measured: Measured, pace: StepCosts | None, mean_s: float) -> Iterator[str]:
    late_s = _latest_s(measured, pace)
    if late_s is not None and late_s > max(MOST_LATE_S, MOST_LATE_SHARE * mean_s):
        yield f"the machine could not keep the pace: a step was {late_s:.1f} s late"


def as_json(measured: Measured, plan: Sequence[Planned], pace: StepCosts | None = None) -> dict[str, Any]:
    """All that the folder keeps of a run. Times are in milliseconds unless their names end with _s. `steady_s`: arrival
    and latency at the steady speed that recording.py explains, as it explains `steps`."""
    stats, recording = measured.stats, measured.recording
    worker = next(iter(stats.workers), Worker())
    steps = recording.steps()
    steadily = recording.steadily(fitted(steps))
    requests = [
        _request(record, planned, recording) | {"steady_s": steadily.get(record.request_id)}
        for record, planned in zip(measured.records, plan, strict=True)
    ]
    return {
        "results": summarise(measured.records, {}, ours=True),
        "conditions": asdict(measured.conditions),
        "faults": faults(measured, pace),
        "latest_s": _latest_s(measured, pace),
        "scheduler": {
            "idle_share": worker.idle_share,
            "outside_forward_share": worker.outside_forward_share,
            "report_to_command_p50_ms": stats.report_to_command_p50.total_seconds() * 1e3,
            "report_to_command_p99_ms": stats.report_to_command_p99.total_seconds() * 1e3,
        },
        "predictor": {
            "finished": stats.predictor.finished,
            "explained": explained_lengths(
                (each.expected, max(1, each.output_tokens), each.max_tokens) for each in _seen(measured)
            ),
        },
        "kv_tokens": recording.kv_tokens,
        "steps": steps,
        "requests": requests,
    }


def _request(record: Record, planned: Planned, recording: Recording) -> dict[str, Any]:
    seen = recording.requests.get(record.request_id)
    return {
        "category": planned.category,
        "due_s": round(record.due_s, 6),
        "ttft_ms": round(1e3 * record.ttft_s, 3),
        "e2el_ms": round(1e3 * record.e2el_s, 3),
        "pause_ms": round(1e3 * record.pause_s, 3),
        "input_tokens": record.input_tokens,
        "output_tokens": record.output_tokens,
        "max_tokens": planned.max_tokens,
        "preemptions": record.preemptions,
        "error": record.error,
        "drafted": seen.drafted if seen else [],
        "accepted": seen.accepted if seen else [],
        "expected": expected_row(seen.expected) if seen else {},
    }
