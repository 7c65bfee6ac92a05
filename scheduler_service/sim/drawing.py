"""What reports in HTML share: the page, its style for dark and light and for narrow windows, axes, figures as SVG.
Needs matplotlib, of the extra `lab`."""

import io
from collections.abc import Mapping, Sequence

import jinja2
import markupsafe
import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 5.6  # inches; a wider figure is scrolled on a narrow window
_STYLE = """:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse}td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #8886}
td:first-child,th:first-child{text-align:left;padding-left:0}th{vertical-align:bottom}td{white-space:nowrap}
td:first-child{white-space:normal;min-width:5.4rem}
.wide{overflow-x:auto;margin:1rem 0}svg{width:100%;max-width:38rem;height:auto}
svg text{fill:currentColor;font-family:inherit!important}
.large svg{min-width:48rem;max-width:none}
dl{display:grid;grid-template-columns:max-content 1fr;gap:0 1rem}dt{opacity:.7}dd{margin:0;overflow-wrap:anywhere}
.bad{color:#d33;font-weight:bold}
@media(max-width:40rem){body{font-size:13px;margin:1rem auto;padding:0 .7rem}td,th{padding:.2rem .35rem}
td:first-child{min-width:4.2rem}}"""
_PAGE = jinja2.Template(
    """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{{ title }}</title>
<style>{{ style }}</style></head><body><h1>{{ title }}</h1>
<dl>{% for name, value in facts.items() %}<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>
{{ body }}{% for title, plot, large in plots %}<h2>{{ title }}</h2>
<div class="wide{{ " large" if large }}">{{ plot }}</div>{% endfor %}
</body></html>
""",
    autoescape=True,
)


def page(title: str, facts: Mapping[str, str], body: str, plots: Sequence[tuple[str, Figure]]) -> str:
    """A report in one file that asks no host for anything. `facts`: what it was made of, by name. `body`: HTML.
    `plots`: with their titles."""
    html: str = _PAGE.render(
        title=title,
        facts=facts,
        style=markupsafe.Markup(_STYLE),
        body=markupsafe.Markup(body),
        plots=[(title, markupsafe.Markup(svg(figure)), figure.get_figwidth() > WIDTH) for title, figure in plots],
    )
    return html


def svg(figure: Figure) -> str:
    """To be part of a page, whose colour of text it has."""
    text = io.StringIO()
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        for side in (axis.xaxis, axis.yaxis):
            if side.get_scale() == "log":
                side.set_major_formatter("{x:g}")
    with mpl.rc_context({"svg.fonttype": "none"}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=nothing, transparent=True)
    return text.getvalue()[text.getvalue().index("<svg") :].replace("#000000", "currentColor")


def file_of(figure: Figure) -> str:
    """A file of its own. Text stays text and ids depend on nothing, so that equal figures are equal files."""
    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "laps-sd"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def figure(rows: int = 1, height: float = 0.0) -> tuple[Figure, Sequence[Axes]]:
    """`rows` of axes under one another, with one axis of x; `height`: of a row, in inches. It is narrow, so that its
    text can be read on a telephone."""
    drawn = Figure(figsize=(WIDTH, rows * (height or (3.0 if rows == 1 else 1.8))), layout="constrained")
    axes = drawn.subplots(rows, 1, sharex=True, squeeze=False)
    for axis in axes[:, 0]:
        axis.spines[["top", "right"]].set_visible(False)
    return drawn, list(axes[:, 0])


def legend(axis: Axes, columns: int = 4) -> None:
    """Above the axes, where no line is."""
    axis.legend(
        frameon=False, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, ncols=columns, fontsize="small"
    )


def shares(lines: Mapping[str, Sequence[float]], label: str) -> Figure:
    """How many requests had ended, or had come so far, within a time. `lines`: the seconds of each, by name; `label`:
    what they are."""
    drawn, (axis,) = figure()
    for name, times_s in lines.items():
        axis.plot(sorted(times_s), [(rank + 1) / len(times_s) for rank in range(len(times_s))], label=name)
    axis.set_xscale("log")
    axis.set_xlabel(label)
    axis.set_ylabel("share of requests")
    legend(axis)
    return drawn


def duration(ms: float) -> str:
    """Milliseconds as people say them, to three digits: 0.84 ms, 84 ms, 1.52 s, 10.9 s, 1,520 s."""
    value, unit = (ms, "ms") if ms < 999.5 else (ms / 1e3, "s")
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f} {unit}"
