"""A frame of `laps-sd top` as people read it, on a terminal of any width. Asks nobody."""

from itertools import chain

from rich.console import Group, RenderableType
from rich.text import Text

from laps_sd.client import NotServing, RequestPage, RequestStatus, Stats, Worker
from laps_sd.tables import Bar, Cell, Column, FittedTable, Phrases
from laps_sd.top_frame import Frame

MOST_TENANTS = 10  # shown at most
BAR_WIDTH = 16
NAME_WIDTH = 20
COLORS = {"running": "green", "paused": "yellow", "waiting": "dim"}


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
    predictor = stats.predictor.state
    return Group(
        Phrases(f"{stats.model or 'no worker'} under {stats.policy}", f"lengths predicted: {predictor}"),
        Phrases(
            *(f"{getattr(stats, name)} {name}" for name in ("running", "paused", "waiting")),
            *(f"{getattr(stats, name)} {name}" for name in ("submitted", "finished", "cancelled", "refused")),
            style="bold",
        ),
        Phrases(
            f"{_number(frame.rate('finished'))} requests/s",
            f"{_number(frame.rate('output_tokens'))} tokens/s",
            f"{_number(frame.rate('preemptions'))} preemptions/s",
            f"{_share(frame.acceptance)} of drafts accepted",
            f"report to command p50 {p50_ms:.2f} ms and p99 {p99_ms:.2f} ms",
        ),
    )


def _queues(stats: Stats) -> FittedTable:
    """Live requests by level; the lowest levels are left out while they are empty."""
    lengths = list(stats.queue_lengths)
    while len(lengths) > 1 and not lengths[-1]:
        lengths.pop()
    longest = max([1, *stats.queue_lengths])
    return FittedTable(
        [Column("level", left=True), Column("live"), Column("", rank=1, bar=2 * BAR_WIDTH)],
        [(str(level), str(length), Bar(length, longest)) for level, length in enumerate(lengths, 1)],
    )


def _tenants(stats: Stats) -> FittedTable:
    return FittedTable(
        [
            Column("tenant", left=True, most=NAME_WIDTH),
            Column("waiting"),
            Column("running"),
            Column("tokens reserved", rank=2),
            Column("refused", rank=1),
        ],
        [
            (one.tenant, str(one.waiting), str(one.running), f"{one.tokens:,}", str(one.refused))
            for one in stats.tenants[:MOST_TENANTS]
        ],
    )


def _workers(frame: Frame) -> FittedTable:
    return FittedTable(
        [
            Column("worker", left=True, most=NAME_WIDTH),
            Column("state", left=True, rank=1),
            Column("slots"),
            Column("placed", rank=4),
            Column("KV used"),
            Column("rounds/s", rank=3),
            Column("tokens/s"),
            Column("idle", rank=2),
            Column("outside passes", rank=5),
        ],
        [
            *(_worker(frame, worker) for worker in frame.stats.workers),
            *((name, "loading", *["-"] * 7) for name in frame.stats.loading_workers),
        ],
    )


def _worker(frame: Frame, worker: Worker) -> tuple[Cell, ...]:
    used = 1 - worker.free_blocks / worker.blocks if worker.blocks else None
    return (
        worker.worker_id,
        "draining" if worker.draining else "serves",
        f"{worker.running}/{worker.slots}",
        str(worker.placed),
        _share(used),
        *(_number(frame.rate(counter, worker.worker_id)) for counter in ("rounds", "output_tokens")),
        _share(worker.idle_share),
        _share(worker.outside_forward_share),
    )


def _requests(listed: RequestPage) -> FittedTable:
    """Output so far, and the whole output as the scheduler believes now."""
    return FittedTable(
        [
            Column("request", left=True),
            Column("state", left=True),
            Column("level", rank=2),
            Column("output"),
            Column("", rank=6, bar=BAR_WIDTH),
            Column("accepted", rank=3),
            Column("remaining s", rank=1),
            Column("preempted", rank=4),
            Column("worker", rank=5, most=NAME_WIDTH),
        ],
        [_request(status, listed) for status in listed.requests],
    )


def _request(status: RequestStatus, listed: RequestPage) -> tuple[Cell, ...]:
    expected = max(1, status.predicted_tokens)
    end, now = status.estimated_end_time, listed.read_time
    remaining_s = (end - now).total_seconds() if end is not None and now is not None else None
    state = status.state or "-"
    return (
        status.request_id[:12],
        Text(state, style=COLORS.get(state, "")),
        str(status.queue_level),
        f"{status.output_tokens}/{expected}",
        Bar(status.output_tokens, expected),
        _share(status.acceptance_rate if status.rounds else None),
        _number(remaining_s),
        str(status.preemptions),
        status.worker_id,
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
