"""What reports in HTML share: the page's style, axes, figures as SVG. Needs matplotlib, of the extra `lab`."""

import io
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse}td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}code{background:#f3f3f3}"""


def svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def file_of(figure: Figure) -> str:
    """A file of its own. Text stays text and ids depend on nothing, so that equal figures are equal files."""
    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "laps-sd"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def figure(rows: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """`rows` of axes under one another, with one time axis."""
    drawn = Figure(figsize=(11, 3.6 if rows == 1 else 2.2 * rows), layout="constrained")
    axes = drawn.subplots(rows, 1, sharex=True, squeeze=False)
    for axis in axes[:, 0]:
        axis.spines[["top", "right"]].set_visible(False)
    return drawn, list(axes[:, 0])
