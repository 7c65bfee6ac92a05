"""`laps-sd top`: queues, requests, workers and rates of a running service, on a terminal. It only calls Stats and
ListRequests, and changes nothing."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import typer
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from laps_sd import terminal
from laps_sd.client import Client
from laps_sd.completion import request_state
from protos.errors import NotServing, RequestError
from protos.times import milliseconds, seconds
from protos.v1 import inference_pb2, status_pb2

MOST_TENANTS = 10  # shown at most
BAR_WIDTH = 16
COLORS = {"running": "green", "paused": "yellow", "waiting": "dim"}


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


def watch(
    server: str, api_key: str | None, ca: Path | None, every_s: float, requests: int, *, once: bool, as_json: bool
) -> None:
    """Frames on stdout until Ctrl-C, or one of them. Raises typer.Exit(1) if the server refuses."""
    try:
        client = Client(server, api_key=api_key, ca=ca)
        asyncio.run(_watch(client, terminal.console(), every_s, requests, once=once, as_json=as_json))
    except RequestError as error:
        typer.echo(f"laps-sd: {error.code.name}: {error.message}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        return


async def _watch(client: Client, console: Console, every_s: float, requests: int, *, once: bool, as_json: bool) -> None:
    live = console.is_terminal and not (once or as_json)
    async with client:
        with _screen(console) if live else _lines(console, as_json) as show:
            async for frame in frames(client, every_s, requests):
                if isinstance(frame, NotServing) and not live:
                    raise frame
                if live or (isinstance(frame, Frame) and frame.before is not None):
                    show(frame)
                    if once:
                        return


async def frames(client: Client, every_s: float, requests: int) -> AsyncIterator[Frame | NotServing]:
    """One at once, then one every `every_s` seconds. A server that cannot be reached gives a NotServing instead of a
    frame; every other error is raised. `requests`: so many are listed, 0 lists none."""
    clock = asyncio.get_running_loop().time
    before, asked_at = None, 0.0
    while True:
        try:
            stats, now = await client.stats(), clock()
            listed = await client.list_requests(requests) if requests else inference_pb2.ListRequestsResponse()
        except NotServing as error:
            before = None
            yield error
        else:
            yield Frame(stats, before, now - asked_at, listed)
            before, asked_at = stats, now
        await asyncio.sleep(every_s)


Show = Callable[[Frame | NotServing], None]


@contextmanager
def _screen(console: Console) -> Iterator[Show]:
    """The whole terminal; what was on it is back afterwards."""
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        yield lambda frame: screen.update(view(frame), refresh=True)


@contextmanager
def _lines(console: Console, as_json: bool) -> Iterator[Show]:
    def show(frame: Frame | NotServing) -> None:
        if as_json and isinstance(frame, Frame):
            print(json.dumps(frame.as_dict()), flush=True)
        else:
            console.print(view(frame))

    yield show


def view(frame: Frame | NotServing) -> RenderableType:
    """A frame as people read it."""
    if isinstance(frame, NotServing):
        return Text(f"{frame.code.name}: {frame.message}", style="red")
    parts: list[RenderableType] = [_summary(frame), _queues(frame.stats), _workers(frame), _requests(frame.listed)]
    if len(frame.stats.tenants) > 1:
        parts.insert(-1, _tenants(frame.stats))
    return Group(*chain.from_iterable((part, "") for part in parts))


def _summary(frame: Frame) -> Group:
    stats = frame.stats
    p50_ms, p99_ms = milliseconds(stats.report_to_command_p50), milliseconds(stats.report_to_command_p99)
    predictor = status_pb2.PredictorState.Name(stats.predictor.state).removeprefix("PREDICTOR_STATE_").lower()
    return Group(
        Text(f"{stats.model or 'no worker'} under {stats.policy}; lengths predicted: {predictor}"),
        Text(
            f"{stats.running} running, {stats.paused} paused, {stats.waiting} waiting;  "
            f"{stats.submitted} submitted, {stats.finished} finished, {stats.cancelled} cancelled, "
            f"{stats.refused} refused",
            style="bold",
        ),
        Text(
            f"{_number(frame.rate('finished'))} requests/s, {_number(frame.rate('output_tokens'))} tokens/s, "
            f"{_number(frame.rate('preemptions'))} preemptions/s;  {_share(frame.acceptance)} of drafts accepted;  "
            f"report to command p50 {p50_ms:.2f}, p99 {p99_ms:.2f} ms"
        ),
    )


def _queues(stats: status_pb2.StatsResponse) -> Table:
    """Live requests by level; the lowest levels are left out while they are empty."""
    lengths = list(stats.queue_lengths)
    while len(lengths) > 1 and not lengths[-1]:
        lengths.pop()
    table = _table("live", "", first="level")
    for level, length in enumerate(lengths, 1):
        bar = ProgressBar(total=max(1, *stats.queue_lengths), completed=length, width=2 * BAR_WIDTH)
        table.add_row(str(level), str(length), bar)
    return table


def _tenants(stats: status_pb2.StatsResponse) -> Table:
    table = _table("waiting", "running", "tokens reserved", "refused", first="tenant")
    for one in stats.tenants[:MOST_TENANTS]:
        table.add_row(Text(one.tenant), str(one.waiting), str(one.running), f"{one.tokens:,}", str(one.refused))
    return table


def _workers(frame: Frame) -> Table:
    table = _table("slots", "placed", "KV used", "rounds/s", "tokens/s", "idle", "outside passes", first="worker")
    for worker in frame.stats.workers:
        used = 1 - worker.free_blocks / worker.blocks if worker.blocks else None
        table.add_row(
            Text(worker.worker_id),
            f"{worker.running}/{worker.slots}",
            str(worker.placed),
            _share(used),
            *(_number(frame.rate(counter, worker.worker_id)) for counter in ("rounds", "output_tokens")),
            _share(worker.idle_share),
            _share(worker.outside_forward_share),
        )
    return table


def _requests(listed: inference_pb2.ListRequestsResponse) -> Table:
    """Output so far, and the whole output as the scheduler believes now."""
    table = _table("state", "level", "output", "", "accepted", "remaining s", "preempted", "worker", first="request")
    for status in listed.requests:
        expected = max(1, status.predicted_tokens)
        known = status.HasField("estimated_end_time")
        remaining_s = seconds(status.estimated_end_time) - seconds(listed.read_time) if known else None
        state = request_state(status)
        table.add_row(
            Text(status.request_id[:12]),
            Text(state, style=COLORS.get(state, "")),
            str(status.queue_level),
            f"{status.output_tokens}/{expected}",
            ProgressBar(total=expected, completed=status.output_tokens, width=BAR_WIDTH),
            _share(status.acceptance_rate if status.rounds else None),
            _number(remaining_s),
            str(status.preemptions),
            Text(status.worker_id),
        )
    return table


def _table(*titles: str, first: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=True, min_width=12)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


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
