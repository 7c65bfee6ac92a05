"""`laps-sd top`: queues, requests, workers and rates of a running service, on a terminal. It only calls Stats and
ListRequests, and changes nothing."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime, timedelta
from itertools import chain
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from laps_sd import terminal
from laps_sd.client import AsyncClient, NotServing, RequestError, RequestPage, Stats
from laps_sd.generate import ApiKey, Ca, Server

MOST_LISTED = 256  # requests of one page: the server lists no more
MOST_TENANTS = 10  # shown at most
BAR_WIDTH = 16
COLORS = {"running": "green", "paused": "yellow", "waiting": "dim"}


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


def top(
    server: Server = "127.0.0.1:50051",
    api_key: ApiKey = None,
    ca: Ca = None,
    every_s: Annotated[float, typer.Option(min=0.05, help="Between frames; rates are over that time.")] = 1.0,
    requests: Annotated[int, typer.Option(min=0, max=MOST_LISTED, help="So many are listed.")] = 20,
    once: Annotated[bool, typer.Option("--once", help="One frame, with rates, and no more.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object for each frame.")] = False,
) -> None:
    """Watch a running service: its queues, requests, workers, rates. A key needs the right `admin`. Ctrl-C ends it."""
    try:
        client = AsyncClient(server, api_key=api_key, ca=ca, max_retries=0)  # it asks again by itself
        asyncio.run(_watch(client, terminal.console(), every_s, requests, once=once, as_json=as_json))
    except RequestError as error:
        typer.echo(f"laps-sd: {error.code.name}: {error.message}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        return


async def _watch(
    client: AsyncClient, console: Console, every_s: float, requests: int, *, once: bool, as_json: bool
) -> None:
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


async def frames(client: AsyncClient, every_s: float, requests: int) -> AsyncIterator[Frame | NotServing]:
    """One at once, then one every `every_s` seconds. A server that cannot be reached gives a NotServing instead of a
    frame; every other error is raised. `requests`: so many are listed, 0 lists none."""
    clock = asyncio.get_running_loop().time
    before, asked_at = None, 0.0
    while True:
        try:
            stats, now = await client.stats(), clock()
            listed = await client.list_requests(requests) if requests else RequestPage()
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
    p50_ms, p99_ms = (1e3 * one.total_seconds() for one in (stats.report_to_command_p50, stats.report_to_command_p99))
    return Group(
        Text(f"{stats.model or 'no worker'} under {stats.policy}; lengths predicted: {stats.predictor.state}"),
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


def _queues(stats: Stats) -> Table:
    """Live requests by level; the lowest levels are left out while they are empty."""
    lengths = list(stats.queue_lengths)
    while len(lengths) > 1 and not lengths[-1]:
        lengths.pop()
    table = _table("live", "", first="level")
    for level, length in enumerate(lengths, 1):
        bar = ProgressBar(total=max(1, *stats.queue_lengths), completed=length, width=2 * BAR_WIDTH)
        table.add_row(str(level), str(length), bar)
    return table


def _tenants(stats: Stats) -> Table:
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


def _requests(listed: RequestPage) -> Table:
    """Output so far, and the whole output as the scheduler believes now."""
    table = _table("state", "level", "output", "", "accepted", "remaining s", "preempted", "worker", first="request")
    for status in listed.requests:
        expected = max(1, status.predicted_tokens)
        end, now = status.estimated_end_time, listed.read_time
        remaining_s = (end - now).total_seconds() if end is not None and now is not None else None
        state = status.state or "-"
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
