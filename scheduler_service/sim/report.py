"""The HTML report of a comparison: one self-contained page with plots as SVG. Needs matplotlib, of the extra `lab`."""

from collections.abc import Mapping
from itertools import groupby

import jinja2
import markupsafe
from matplotlib.figure import Figure

from scheduler_service.sim import drawing
from scheduler_service.sim.results import percentile
from scheduler_service.sim.simulator import Trace

SHOWN = {
    "mean_e2el_ms": "mean latency, ms",
    "median_e2el_ms": "median",
    "p90_e2el_ms": "p90",
    "p99_e2el_ms": "p99",
    "mean_ttft_ms": "mean to first token",
    "output_throughput": "tokens/s",
    "preemptions_per_request": "preemptions",
    "spec_decode_acceptance_length": "tokens a round",
}
_PAGE = jinja2.Template(
    """<!doctype html><html lang="en"><meta charset="utf-8"><title>LAPS-SD simulation</title>
<style>{{ style }}</style>
<h1>LAPS-SD simulation</h1><p><code>{{ command }}</code></p>
<table><tr><th>policy</th>{% for title in shown.values() %}<th>{{ title }}</th>{% endfor %}</tr>
{% for name, row in results.items() %}<tr><td>{{ name }}</td>
{% for key in shown %}<td>{{ "{:,.2f}".format(row[key]) }}</td>{% endfor %}</tr>{% endfor %}</table>
{% for title, svg in plots %}<h2>{{ title }}</h2>{{ svg }}{% endfor %}</html>""",
    autoescape=True,
)


def render(command: str, results: Mapping[str, Mapping[str, float]], traces: Mapping[str, Trace]) -> str:
    """The page. `results` and `traces` by policy; `command` is shown so that the run can be repeated."""
    traces = {name: trace for name, trace in traces.items() if trace.outcomes}
    plots = (
        []
        if not traces
        else [
            ("Latency by policy", _bars(results)),
            ("How many ended within a time", _shares(traces)),
            ("Latency against size", _by_size(traces)),
            ("Live requests by queue level", _levels(traces)),
        ]
    )
    page: str = _PAGE.render(
        style=markupsafe.Markup(drawing.STYLE),
        command=command,
        shown=SHOWN,
        results=results,
        plots=[(title, markupsafe.Markup(drawing.svg(figure))) for title, figure in plots],
    )
    return page


def _bars(results: Mapping[str, Mapping[str, float]]) -> Figure:
    figure, (axis,) = drawing.figure()
    places = range(len(results))
    for offset, (key, label) in enumerate((("mean_e2el_ms", "mean"), ("p90_e2el_ms", "p90"), ("p99_e2el_ms", "p99"))):
        heights = [row[key] / 1e3 for row in results.values()]
        axis.bar([place + 0.27 * (offset - 1) for place in places], heights, 0.25, label=label)
    axis.set_xticks(places, list(results))
    axis.set_ylabel("seconds")
    axis.legend(frameon=False)
    return figure


def _shares(traces: Mapping[str, Trace]) -> Figure:
    figure, (axis,) = drawing.figure()
    for name, trace in traces.items():
        latencies = sorted(outcome.latency_s for outcome in trace.outcomes)
        axis.plot(latencies, [(rank + 1) / len(latencies) for rank in range(len(latencies))], label=name)
    axis.set_xscale("log")
    axis.set_xlabel("seconds from arrival to end")
    axis.set_ylabel("share of requests")
    axis.legend(frameon=False)
    return figure


def _by_size(traces: Mapping[str, Trace]) -> Figure:
    """The median of each doubling of output tokens, with the span from p10 to p90."""
    figure, (axis,) = drawing.figure()
    for name, trace in traces.items():
        outcomes = sorted(trace.outcomes, key=lambda outcome: outcome.job.output_tokens)
        points: list[tuple[float, float, float, float]] = []
        for size, group in groupby(outcomes, key=lambda outcome: outcome.job.output_tokens.bit_length()):
            latencies = sorted(outcome.latency_s for outcome in group)
            points.append((2.0 ** (size - 0.5), *(percentile(latencies, share) for share in (0.1, 0.5, 0.9))))
        sizes, low, middle, high = zip(*points, strict=True)
        (line,) = axis.plot(sizes, middle, marker="o", label=name)
        axis.fill_between(sizes, low, high, color=line.get_color(), alpha=0.1)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("output tokens")
    axis.set_ylabel("seconds from arrival to end")
    axis.legend(frameon=False)
    return figure


def _levels(traces: Mapping[str, Trace]) -> Figure:
    figure, axes = drawing.figure(len(traces))
    for axis, (name, trace) in zip(axes, traces.items(), strict=True):
        times = [now for now, _ in trace.levels]
        levels = sorted({level for _, counts in trace.levels for level in counts})
        axis.stackplot(
            times, [[counts[level] for _, counts in trace.levels] for level in levels], labels=map(str, levels)
        )
        axis.set_title(name, loc="left", fontsize="medium")
        if 1 < len(levels) <= 8:
            axis.legend(frameon=False, loc="upper left", ncols=len(levels), fontsize="small")
    axes[-1].set_xlabel("seconds")
    return figure
