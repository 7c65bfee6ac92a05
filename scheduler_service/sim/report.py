"""The HTML report of a comparison: one self-contained page with plots as SVG. Needs matplotlib, of the extra `lab`."""

from collections.abc import Callable, Mapping
from itertools import groupby

import jinja2
from matplotlib.figure import Figure

from scheduler_service.sim import drawing
from scheduler_service.sim.results import percentile
from scheduler_service.sim.simulator import Trace

# Columns: their titles, and how their figures are written.
SHOWN: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "mean_e2el_ms": ("mean latency", drawing.duration),
    "median_e2el_ms": ("median", drawing.duration),
    "p90_e2el_ms": ("p90", drawing.duration),
    "p99_e2el_ms": ("p99", drawing.duration),
    "mean_ttft_ms": ("mean to first token", drawing.duration),
    "p99_ttft_ms": ("p99 to first token", drawing.duration),
    "p99_pause_ms": ("p99 longest pause", drawing.duration),
    "good_share": ("in time", "{:.1%}".format),
    "output_throughput": ("tokens/s", "{:,.0f}".format),
    "preemptions_per_request": ("preemptions a request", "{:.2f}".format),
    "spec_decode_acceptance_length": ("tokens a round", "{:.2f}".format),
}
_BODY = jinja2.Template(
    """<div class="wide"><table><tr><th>policy</th>
{% for title, _ in shown.values() %}<th>{{ title }}</th>{% endfor %}</tr>
{% for name, row in results.items() %}<tr><td>{{ name }}</td>
{% for key, (_, written) in shown.items() %}<td>{{ written(row[key]) }}</td>{% endfor %}</tr>
{% endfor %}</table></div>""",
    autoescape=True,
)


def render(facts: Mapping[str, str], results: Mapping[str, Mapping[str, float]], traces: Mapping[str, Trace]) -> str:
    """The page. `facts`: what it was made of, by name. `results` and `traces` by policy."""
    traces = {name: trace for name, trace in traces.items() if trace.outcomes}
    plots = (
        []
        if not traces
        else [
            ("Latency by policy", _bars({name: results[name] for name in traces})),
            ("How many ended within a time", _shares(traces)),
            ("Latency against size", _by_size(traces)),
            ("Live requests by queue level", _levels(traces)),
        ]
    )
    return drawing.page("LAPS-SD simulation", facts, _BODY.render(shown=SHOWN, results=results), plots)


def _bars(results: Mapping[str, Mapping[str, float]]) -> Figure:
    """The mean has axes of its own: beside a p99 its differences could not be seen."""
    figure, axes = drawing.figure(rows=3, height=1.4)
    for axis, kind in zip(axes, ("mean", "p90", "p99"), strict=True):
        ms = [row[f"{kind}_e2el_ms"] for row in results.values()]
        bars = axis.bar(range(len(ms)), [each / 1e3 for each in ms], 0.6, color=[f"C{i % 10}" for i in range(len(ms))])
        axis.bar_label(bars, [drawing.duration(each) for each in ms], fontsize="small")
        axis.set_ylabel(f"{kind}, s")
        axis.margins(y=0.2)
    axes[-1].set_xticks(range(len(results)), [name.replace(":", "\n") for name in results], fontsize="small")
    return figure


def _shares(traces: Mapping[str, Trace]) -> Figure:
    latencies = {name: [outcome.latency_s for outcome in trace.outcomes] for name, trace in traces.items()}
    return drawing.shares(latencies, "seconds from arrival to end")


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
    drawing.legend(axis)
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
            drawing.legend(axis, columns=len(levels))
    axes[-1].set_xlabel("seconds")
    return figure
