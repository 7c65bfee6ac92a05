"""The pages of a comparison: HTML for `--html`, and docs/explanation/benchmarks.md with its plots and tables, made from
the JSON alone by `python -m laps_sd.compare.page`. The figures decide which remarks appear. Needs matplotlib, of the
extra `lab`.
"""

import csv
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
from matplotlib.figure import Figure

from laps_sd.compare.design import BASE
from laps_sd.compare.show import HEADINGS, rows, served, with_runs
from laps_sd.compare.summary import OURS, sentences, whole, wrong
from scheduler_service.sim import drawing
from scheduler_service.sim.results import GOOD_TPOT_MS, GOOD_TTFT_MS

Summary = Mapping[str, Any]

# The origin of prompts, by the name of their file.
SOURCES = {
    "arena_hard": "Arena-Hard (lmarena/arena-hard-auto, Apache-2.0)",
    "mt_bench": "MT-bench (lm-sys/FastChat, Apache-2.0)",
    "vicuna_bench": "Vicuna bench (lm-sys/FastChat, Apache-2.0)",
    "mbpp": "MBPP (Austin et al. 2021, CC BY 4.0)",
    "humaneval": "HumanEval (openai/human-eval, MIT)",
    "gsm8k_test": "GSM8K (openai/grade-school-math, MIT)",
    "math500": "MATH-500 (Hendrycks et al. 2021, MIT)",
}

_BODY = jinja2.Template(
    """{% for cell in summary.cells %}{% set headings, rows = told(cell) %}
<h2>{{ cell.name }}</h2><p>{{ served(cell) }}</p>
<div class="wide"><table><tr>{% for name in headings %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for value in row %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}</table></div>{% endfor %}
<ul>{% for sentence in sentences(summary) %}<li>{{ sentence }}</li>{% endfor %}</ul>""",
    autoescape=True,
)


def html(summary: Summary, facts: Mapping[str, str]) -> str:
    """The page. `facts`: what it was made of, by name."""
    body = _BODY.render(
        summary=summary,
        told=_told,
        served=served,
        sentences=sentences,
    )
    return drawing.page("LAPS-SD: policies compared on the live service", facts, body, list(_figures(summary)))


def _told(cell: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows. Times come with their units."""
    headings, lines = with_runs(cell, drawing.duration)
    return [name.replace("simulated ms", "simulated mean").removesuffix(" ms") for name in headings], lines


def verdicts(summary: Summary) -> Iterator[str]:
    """Of each policy: in how many cells it is below and above the base, beyond the interval."""
    names = dict.fromkeys(name for cell in summary["cells"] for name in cell["policies"] if name != BASE)
    for name in names:
        found: dict[str, list[str]] = {"lower": [], "higher": [], "same": []}
        for cell in summary["cells"]:
            if "ratio" in (row := cell["policies"].get(name, {})):
                found[row["ratio"]["verdict"]].append(cell["name"])
        above = f" ({'; '.join(found['higher'])})" if found["higher"] else ""
        yield (
            f"`{name}`: below {BASE} in {len(found['lower'])} of {sum(map(len, found.values()))} cells, above it in "
            f"{len(found['higher'])}{above}."
        )


def furthest(summary: Summary) -> dict[str, float]:
    """How far the simulator's ratios and means are from the live ones at most, and the largest idle share."""
    every = [row for cell in summary["cells"] for row in cell["policies"].values()]
    ratios = [abs(row["predicted_ratio"] / row["ratio"]["value"] - 1) for row in every if "ratio" in row]
    means = [abs(row["predicted_mean_ms"] / row["e2el_ms"]["mean"] - 1) for row in every]
    return {"ratio": max(ratios), "mean": max(means), "idle": max(row["idle_share"] for row in every)}


# ---- plots ----


def plots(summary: Summary) -> Iterator[tuple[str, str, str]]:
    """Title, file name and SVG of each."""
    for name, (title, figure) in zip(("ratios", "latencies", "predicted"), _figures(summary), strict=True):
        yield title, f"{name}.svg", _svg(figure)


def _figures(summary: Summary) -> Iterator[tuple[str, Figure]]:
    if not summary["cells"]:
        return
    yield f"Mean latency over that of {BASE}", _ratios(summary)
    yield "How many ended within a time", _shares(summary)
    yield "Predicted by the simulator, and measured", _predicted(summary)


def _ratios(summary: Summary) -> Figure:
    """Ratios with intervals. A bar marks what the simulator predicts, a diamond its oracle."""
    cells = [cell for cell in summary["cells"] if any("ratio" in row for row in cell["policies"].values())]
    names = list(dict.fromkeys(name for cell in cells for name in cell["policies"] if name != BASE))
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axis = figure.subplots()
    for place, name in enumerate(names):
        shift = (place + 0.5) / (len(names) + 1) * 0.8 - 0.4
        points = [(x, row) for x, cell in enumerate(cells) if "ratio" in (row := cell["policies"].get(name, {}))]
        xs = [x + shift for x, _ in points]
        values = [row["ratio"]["value"] for _, row in points]
        errors = [
            [max(0.0, row["ratio"]["value"] - row["ratio"]["low"]) for _, row in points],
            [max(0.0, row["ratio"]["high"] - row["ratio"]["value"]) for _, row in points],
        ]
        axis.errorbar(xs, values, errors, fmt="o", capsize=3, label=name)
        axis.plot(xs, [row["predicted_ratio"] for _, row in points], "_", color="black", markersize=10)
    diamonds = [(x + 0.4, cell["oracle"]["predicted_ratio"]) for x, cell in enumerate(cells) if cell["oracle"]]
    xs, values = [x for x, _ in diamonds], [value for _, value in diamonds]
    axis.plot(xs, values, "D", color="grey", markersize=4, label="oracle, simulated")
    axis.plot([], [], "_", color="black", markersize=10, label="simulated")
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_xticks(range(len(cells)), [cell["name"].replace(", ", "\n") for cell in cells])
    axis.set_ylabel(f"mean latency over that of {BASE}")
    axis.set_ylim(bottom=0)
    drawing.legend(axis, columns=4)
    return figure


def _shares(summary: Summary) -> Figure:
    cells = summary["cells"]
    figure = Figure(figsize=(11, 2.8 * -(-len(cells) // 2)), layout="constrained")
    axes = figure.subplots(-(-len(cells) // 2), 2, squeeze=False).flatten()
    for axis, cell in zip(axes, cells, strict=False):
        for name, row in whole(cell).items():
            seconds = [ms / 1e3 for ms in row["quantiles_ms"]]
            axis.plot(seconds, [share / 100 for share in range(1, 100, 2)], label=name)
        axis.set_xscale("log")
        axis.set_title(cell["name"], loc="left", fontsize="medium")
        axis.set_xlabel("seconds from arrival to end")
        drawing.legend(axis, columns=3)
    for axis in axes[len(cells) :]:
        axis.set_axis_off()
    return figure


def _predicted(summary: Summary) -> Figure:
    figure = Figure(figsize=(5.5, 5), layout="constrained")
    axis = figure.subplots()
    points: dict[str, list[tuple[float, float]]] = {}
    for cell in summary["cells"]:
        for name, row in cell["policies"].items():
            points.setdefault(name, []).append((row["e2el_ms"]["mean"] / 1e3, row["predicted_mean_ms"] / 1e3))
    for name, some in points.items():
        axis.plot(*zip(*some, strict=True), "o", label=name)
    ends = [min(x for some in points.values() for x, _ in some), max(x for some in points.values() for x, _ in some)]
    axis.plot(ends, ends, color="grey", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("mean latency measured, s")
    axis.set_ylabel("predicted, s")
    drawing.legend(axis, columns=3)
    return figure


def _svg(figure: Figure) -> str:
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    return drawing.file_of(figure)


# ---- docs/explanation/benchmarks.md ----


def render(
    summary: Summary,
    scheduler: Mapping[str, Any] | None = None,
    unpaced: Summary | None = None,
    arrivals: Mapping[str, Any] | None = None,
    opening: Summary | None = None,
    longer: Summary | None = None,
) -> str:
    """The page. `scheduler`: the JSON of `laps-sd bench scheduler`; `unpaced`: a comparison without --pace; `arrivals`:
    the JSON of laps_sd.compare.arrivals; `opening`: a comparison of what policies do to first tokens; `longer`: one
    with more slots and longer answers."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    text = Path(__file__).with_name("benchmarks.md.jinja").read_text()
    every = [name for cell in summary["cells"] for name in cell["policies"]]
    page: str = environment.from_string(text).render(
        summary=summary,
        scheduler=scheduler,
        unpaced=unpaced,
        opening=opening,
        longer=longer,
        others={cell["name"]: cell["ratios"] for cell in arrivals["cells"]} if arrivals else {},
        draws=arrivals["draws"] if arrivals else 0,
        names=[name for name in dict.fromkeys(every) if name not in (BASE, OURS)],
        pauses=any("pause_ms" in row for cell in summary["cells"] for row in cell["policies"].values()),
        goods=all("good_share" in row for cell in summary["cells"] for row in cell["policies"].values()),
        good=(GOOD_TTFT_MS, GOOD_TPOT_MS),
        repeated=any(row["repetitions"] > 1 for cell in summary["cells"] for row in cell["policies"].values()),
        sources=SOURCES,
        ours=OURS,
        base=BASE,
        plots=[(title, name) for title, name, _ in plots(summary)],
        **{tool.__name__: tool for tool in (verdicts, furthest, wrong, short, least_to_most, drawing.duration)},
    )
    return page


def short(ratio: Mapping[str, float]) -> str:
    """A ratio with its interval, to two digits."""
    return f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def least_to_most(ratios: Sequence[float]) -> str:
    return f"{fmean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def table(summary: Summary) -> str:
    """CSV: a row for each policy in each cell, with every figure."""
    every = [row for cell in summary["cells"] for row in cell["policies"].values()]
    kinds = list(dict.fromkeys(kind for row in every for kind in row["e2el_ms_by_kind"]))
    more = {
        "repetitions": "repetitions",
        "faults": "disturbed",
        "explained": "explained",
        "output_throughput": "tokens/s",
    }
    more["report_to_command_p99_ms"] = "report to command p99 ms"
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["cell", *HEADINGS, *(f"{kind} mean ms" for kind in kinds), *more.values()])
    for cell in summary["cells"]:
        for line in rows(cell, "{:.1f}".format):
            row = cell["policies"].get(line[0], {})  # the simulated oracle has none
            of_kinds = (f"{ms:.1f}" if (ms := row.get("e2el_ms_by_kind", {}).get(kind)) else "" for kind in kinds)
            writer.writerow([cell["name"], *line, *of_kinds, *(f"{row[name]:.4g}" if row else "" for name in more)])
    return text.getvalue()


def main() -> None:
    """Makes the page, its plots and tables of the records in docs/benchmarks; another folder than docs may be named.
    Sections whose record is missing (scheduler.json, unpaced.json, ...) are left out."""
    docs = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    folder, page = docs / "benchmarks", docs / "explanation" / "benchmarks.md"
    summary = json.loads((folder / "record.json").read_text())
    for _, name, svg in plots(summary):
        (folder / name).write_text(svg)
    scheduler, unpaced, arrivals, opening, longer = (
        json.loads(file.read_text()) if (file := folder / name).exists() else None
        for name in ("scheduler.json", "unpaced.json", "arrivals.json", "opening.json", "longer.json")
    )
    for name, found in (("cells", summary), ("unpaced", unpaced), ("opening", opening), ("longer", longer)):
        if found:
            (folder / f"{name}.csv").write_text(table(found))
    page.parent.mkdir(exist_ok=True)
    page.write_text(render(summary, scheduler, unpaced, arrivals, opening, longer))


if __name__ == "__main__":
    main()
