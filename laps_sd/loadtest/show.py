"""A load test on the terminal: a progress bar while it runs, tables when it has ended. Computes no statistics."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from laps_sd.loadtest.record import Tally
from laps_sd.tables import Column, FittedTable
from scheduler_service.sim.results import GOOD_TPOT_MS, GOOD_TTFT_MS

REFRESH_PER_S = 4
LATE = "the driver fell behind its schedule: these figures are not the server's. Use more --drivers, or a lower rate"

KINDS = ("mean", "median", "std", "p90", "p99")
LEAVES = {"mean": 0, "p99": 0, "median": 1, "p90": 2, "std": 3}  # the highest leaves a narrow terminal first
TITLE_WIDTH = 22
TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between outputs",
    "pause": "longest pause",
    "e2el": "latency",
}


class Bar:
    """A progress bar on stderr while its block runs. Shows nothing if stderr is not a terminal."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        self._total, self._began = total, 0.0
        self._tally: Callable[[], Tally] = Tally
        console = console or Console(stderr=True)
        self._live = (
            Live(console=console, get_renderable=self._render, refresh_per_second=REFRESH_PER_S, transient=True)
            if console.is_terminal
            else None
        )

    def watch(self, tally: Callable[[], Tally]) -> None:
        """The run begins. `tally` returns the totals up to now."""
        self._tally, self._began = tally, time.monotonic()

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def _render(self) -> Table:
        now = self._tally()
        ended = now.completed + now.failed
        elapsed_s = time.monotonic() - self._began if self._began else 0.0
        row = Table.grid(padding=(0, 2))
        row.add_row(
            ProgressBar(total=self._total, completed=ended, width=24),
            f"{ended}/{self._total}",
            f"{now.sent - ended} in flight",
            f"[red]{now.failed} failed[/]" if now.failed else "0 failed",
            f"{now.tokens / max(elapsed_s, 1e-9):.0f} tokens/s",
            f"mean {1e3 * now.e2el_s / max(1, now.completed):.0f} ms",
            f"{elapsed_s:.0f} s",
        )
        return row


def table(results: Mapping[str, Any]) -> Group:
    """The figures of results.py as tables."""
    times = FittedTable(
        [Column(f"{'ms':{TITLE_WIDTH}}", left=True), *(Column(f"{kind:>9}", LEAVES[kind]) for kind in KINDS)],
        [[title, *(_ms(results[f"{kind}_{name}_ms"]) for kind in KINDS)] for name, title in TITLES.items()],
    )
    rest = Table(box=None, show_header=False, pad_edge=False)
    rest.add_column(min_width=TITLE_WIDTH, overflow="fold")
    rest.add_column(overflow="fold")
    for title, value in figures(results).items():
        rest.add_row(title, Text(value))  # no markup: a server's error may have brackets
    return Group(times, "", rest)


def _ms(time_ms: float | None) -> str:
    return "-" if time_ms is None else f"{time_ms:,.1f}"


def figures(results: Mapping[str, Any]) -> dict[str, str]:
    """All figures but the times, as text, by title."""
    errors = ", ".join(f"{count} {name}" for name, count in results["errors"].items())
    shown = {
        "completed, failed": f"{results['completed']}, {results['failed']}" + (f" ({errors})" if errors else ""),
        **({"first error": results["first_error"]} if errors else {}),
        "seconds": f"{results['duration']:,.1f}",
        "requests/s": f"{results['request_throughput']:,.2f}",
    }
    shown["in time"] = (
        f"{results['good_share']:.1%} (first token in {GOOD_TTFT_MS:g} ms, then {GOOD_TPOT_MS:g} ms each)"
    )
    if "request_goodput" in results:
        shown["within the SLOs, /s"] = f"{results['request_goodput']:,.2f}"
    shown |= {
        "output tokens/s": f"{results['output_throughput']:,.1f} (best second {results['max_output_tokens_per_s']:,})",
        "tokens in, out": f"{results['total_input_tokens']:,}, {results['total_output_tokens']:,}",
        "in flight at most": f"{results['max_concurrent_requests']:,}",
    }
    if "preemptions_per_request" in results and results["completed"]:
        rate, length = results["spec_decode_acceptance_rate"], results["spec_decode_acceptance_length"]
        shown["acceptance"] = f"{rate:.1f} % of drafts, {length:.2f} tokens a drafting round"
        shown["preemptions a request"] = f"{results['preemptions_per_request']:.2f}"
    if results.get("clipped"):
        shown["clipped to the context"] = f"{results['clipped']:,}"
    shown["sent late, p99 ms"] = f"{results['p99_send_lateness_ms']:.1f}" + ("" if results["kept_up"] else " TOO LATE")
    return shown
