"""The HTML page of a load test, with plots, in one file. Needs matplotlib, of the extra `lab`."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import jinja2
from matplotlib.figure import Figure

from laps_sd.loadtest.record import Record
from laps_sd.loadtest.show import KINDS, LATE, TITLES, figures
from scheduler_service.sim import drawing

_BODY = jinja2.Template(
    """{% if not results.kept_up %}<p class="bad">{{ late }}.</p>{% endif %}
<div class="wide"><table><tr><th></th>{% for column in columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for name, title in times.items() %}<tr><td>{{ title }}</td>
{% for column in columns %}
<td>{{ duration(results[column ~ "_" ~ name ~ "_ms"]) if results.completed else "-" }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
<div class="wide"><table>
{% for title, value in figures.items() %}<tr><td>{{ title }}</td><td>{{ value }}</td></tr>
{% endfor %}</table></div>
<p>Latency counts from the time a request was to arrive, whenever it was sent.</p>""",
    autoescape=True,
)


def render(
    facts: Mapping[str, str],
    results: Mapping[str, Any],
    records: Sequence[Record],
    timeline: Sequence[Mapping[str, Any]],
) -> str:
    """The page. `facts`: what it was made of, by name. `timeline`: `Timeline.samples`."""
    done = [record for record in records if record.measured and record.completed]
    plots = []
    if done:
        plots += [("How many ended within a time", _shares(done)), ("Latency against output length", _by_length(done))]
    if len(timeline) > 1:
        plots.append(("The server's queue over time", _over_time(timeline)))
    body = _BODY.render(
        results=results, late=LATE, columns=KINDS, times=TITLES, figures=figures(results), duration=drawing.duration
    )
    return drawing.page("LAPS-SD load test", facts, body, plots)


def _shares(done: Sequence[Record]) -> Figure:
    times_s = {"first token": [r.ttft_s for r in done], "whole answer": [r.e2el_s for r in done]}
    return drawing.shares(times_s, "seconds after arrival")


def _by_length(done: Sequence[Record]) -> Figure:
    figure, (axis,) = drawing.figure()
    for category in sorted({record.category for record in done}):
        some = [record for record in done if record.category == category]
        tokens, times_s = [record.output_tokens for record in some], [record.e2el_s for record in some]
        axis.plot(tokens, times_s, ".", alpha=0.5, label=category or "requests")
    axis.set_xlabel("output tokens")
    axis.set_ylabel("seconds from arrival to end")
    axis.set_ylim(bottom=0)
    drawing.legend(axis)
    return figure


def _over_time(timeline: Sequence[Mapping[str, Any]]) -> Figure:
    """Requests by state at each sample; preemptions and acceptance between samples."""
    figure, (states, preempted, accepted) = drawing.figure(rows=3)
    times_s = [sample["t_s"] for sample in timeline]
    for state in ("waiting", "running", "paused"):
        states.plot(times_s, [sample[state] for sample in timeline], label=state)
    states.set_ylabel("requests")
    drawing.legend(states)
    rates, shares = [], []
    for before, after in pairwise(timeline):
        grown = {name: after[name] - before[name] for name in after if name.startswith(("num_", "pre", "t_s"))}
        rates.append(grown["preemptions"] / max(grown["t_s"], 1e-9))
        drafted = grown["num_draft_tokens"]
        shares.append(grown["num_accepted_tokens"] / drafted if drafted > 0 else float("nan"))
    preempted.plot(times_s[1:], rates, color="tab:red")
    preempted.set_ylabel("preemptions/s")
    accepted.plot(times_s[1:], shares, color="tab:purple")
    accepted.set_ylim(0, 1)
    accepted.set_ylabel("accepted share")
    accepted.set_xlabel("seconds after the start")
    return figure
