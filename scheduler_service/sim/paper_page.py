"""The page on the reproduced paper, and its plots, made from the results of `paper`, `decision` and `worth`.

Sentences that judge are chosen by the figures. Plots need matplotlib, of the extra `lab`.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
from matplotlib.figure import Figure

from scheduler_service.sim import drawing
from scheduler_service.sim.decision import GOALS_MS
from scheduler_service.sim.results import interval_95
from scheduler_service.sim.worth import lines, said

PAPER_GAIN = 0.39  # below the mean of other methods
PAPER_ERROR = 0.0684  # of estimated times
MEAN_OF = ("fcfs", "sjf", "las")  # "the mean of the three"
NOTHING = 0.05  # a gain below this is nothing to speak of
STAR = "laps-sd*"

Cell = Mapping[str, Mapping[str, Sequence[float]]]  # policy -> figure -> a value for each seed
Loads = Mapping[str, Cell]  # by load


def write(results: Mapping[str, Any], folder: Path) -> None:
    """`explanation`/paper.md in `folder`; its plots and table in `folder`/paper, where `decision` and `worth` may have
    left their figures."""
    plots, page = folder / "paper", folder / "explanation" / "paper.md"
    for parent in (plots, page.parent):
        parent.mkdir(parents=True, exist_ok=True)
    for name, figure in draw(results).items():
        (plots / f"{name}.svg").write_text(drawing.file_of(figure))
    (plots / "figures.csv").write_text(table(results))
    decision, worth = (
        json.loads(file.read_text()) if (file := plots / f"{name}.json").exists() else None
        for name in ("decision", "worth")
    )
    page.write_text(render(results, decision, worth))


# ---- figures ----


def gain(cell: Cell, policy: str, bases: Sequence[str]) -> tuple[float, float]:
    """By which share the mean latency lies below the mean of that of `bases`, seed by seed, with its 95 % interval."""
    below = (fmean(seed) for seed in zip(*(cell[base]["mean_s"] for base in bases), strict=True))
    return interval_95([1 - mine / theirs for mine, theirs in zip(cell[policy]["mean_s"], below, strict=True)])


def ratio(cell: Cell, policy: str, base: str, figure: str = "mean_s") -> tuple[float, float]:
    pairs = zip(cell[policy][figure], cell[base][figure], strict=True)
    return interval_95([mine / theirs for mine, theirs in pairs])


def percent(value: tuple[float, float]) -> str:
    return f"{100 * value[0]:.0f} ±{100 * value[1]:.0f}"


def plain(value: tuple[float, float], digits: int = 2) -> str:
    return f"{value[0]:.{digits}f} ±{value[1]:.{digits}f}"


# ---- sentences ----


def headline(results: Mapping[str, Any]) -> Iterator[str]:
    """Where each reading of LAPS-SD gains what the paper reports."""
    for reading, policy in results["settings"]["readings"].items():
        reached: list[str] = []
        gains: list[float] = []
        for kind, loads in (*results["loads"].items(), *results["tails"].items()):
            found = {load: gain(cell, policy, MEAN_OF)[0] for load, cell in loads.items()}
            gains += found.values()
            if at := [load for load, value in found.items() if value >= PAPER_GAIN]:
                reached.append(f"{kind} at {_listed(at)}")
        where = f"reaches it: {'; '.join(reached)}" if reached else "reaches it nowhere"
        yield f"`{reading}` {where} (from {100 * min(gains):.0f} to {100 * max(gains):.0f} %)."


def against(results: Mapping[str, Any], policy: str) -> Iterator[str]:
    """Over which of the others it wins or loses beyond the interval, over all kinds and loads."""
    cells = [(kind, load, cell) for kind, loads in results["loads"].items() for load, cell in loads.items()]
    for base in (*MEAN_OF, "mlfq", "srpt-length", "gittins"):
        gains = [(kind, load, *gain(cell, policy, (base,))) for kind, load, cell in cells]
        wins = sum(mean > half for *_, mean, half in gains)
        losses = sum(mean < -half for *_, mean, half in gains)
        yield f"better than {base} in {wins} of {len(gains)} cells, worse in {losses}"


def estimates(results: Mapping[str, Any]) -> str:
    means = {sigma: fmean(results["errors"]["mix"][sigma]["laps-sd"]["mean"]) for sigma in results["errors"]["mix"]}
    alone = means["0"]
    verdict = "within" if alone <= PAPER_ERROR else "above"
    noisy = ", ".join(f"{100 * mean:.1f} % at sigma {sigma}" for sigma, mean in means.items() if sigma != "0")
    return (
        f"on the mix the acceptance part alone errs by {100 * alone:.1f} %, {verdict} the paper's "
        f"{100 * PAPER_ERROR:.2f} %; with predicted lengths the error is theirs: {noisy}. "
        "Requests that never become perceptible are served by attained service."
    )


def nothing_to_gain(results: Mapping[str, Any]) -> str:
    empty = [
        f"{slots} slots up to load {max(loads, key=float)}"
        for slots, cells in by_slots(results).items()
        if (loads := [load for load, cell in cells.items() if gain(cell, "oracle", ("fcfs",))[0] < NOTHING])
    ]
    where = "; ".join(empty) or "nowhere"
    return f"Even the oracle gains less than {100 * NOTHING:.0f} % over fcfs with {where}."


def ablated(results: Mapping[str, Any]) -> Iterator[str]:
    """Choices that matter: beyond the interval, best and worst first."""
    (cell,) = results["ablations"]["mix"].values()
    changes = {policy: gain(cell, policy, ("laps-sd",)) for policy in cell if policy.startswith("laps-sd:")}
    better = sorted((p for p, (mean, half) in changes.items() if mean > half), key=lambda p: -changes[p][0])
    worse = sorted((p for p, (mean, half) in changes.items() if mean < -half), key=lambda p: changes[p][0])
    for word, policies in (("Better", better), ("Worse", worse)):
        said = (f"`{p.partition(':')[2]}` ({100 * abs(changes[p][0]):.1f} %)" for p in policies[:5])
        yield f"{word} than the default beyond the interval, the first five: {', '.join(said) or 'none'}."


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


# ---- plots ----


def draw(results: Mapping[str, Any]) -> dict[str, Figure]:
    return {
        "latency": _by_load(results, "mean latency over that of fcfs", _latencies),
        "gain": _by_load(results, "below the mean of fcfs, sjf, las", _gains),
        "ablations": _ablations(results),
        "map": _map(results),
    }


def _by_load(results: Mapping[str, Any], label: str, curves: Any) -> Figure:
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    for axis, (kind, loads) in zip(axes.flat, results["loads"].items(), strict=True):
        for name, points in curves(results, loads):
            axis.plot([float(load) for load in loads], points, marker=".", label=name)
        axis.set_title(kind, loc="left", fontsize="medium")
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel(label)
    for axis in axes[1]:
        axis.set_xlabel("load")
    if curves is _gains:
        for axis in axes.flat:
            axis.axhline(PAPER_GAIN, color="0.6", linestyle="--", label="the paper's 39 %")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), frameon=False, loc="outside right upper")
    return figure


def _latencies(results: Mapping[str, Any], loads: Loads) -> Iterator[tuple[str, list[float]]]:
    for name, policy in _named(results):
        if name not in ("remaining", "stay"):
            yield name, [ratio(cell, policy, "fcfs")[0] for cell in loads.values()]


def _gains(results: Mapping[str, Any], loads: Loads) -> Iterator[tuple[str, list[float]]]:
    for name, policy in (*results["settings"]["readings"].items(), ("gittins", "gittins")):
        yield name, [gain(cell, policy, MEAN_OF)[0] for cell in loads.values()]


def _ablations(results: Mapping[str, Any]) -> Figure:
    (cell,) = results["ablations"]["mix"].values()
    variants = [policy for policy in cell if policy.startswith("laps-sd:")]
    means, halves = zip(*(gain(cell, policy, ("laps-sd",)) for policy in variants), strict=True)
    figure = Figure(figsize=(8, 0.24 * len(variants) + 0.8), layout="constrained")
    axis = figure.subplots()
    axis.errorbar(means, range(len(variants)), xerr=halves, fmt="o", color="C0")
    axis.axvline(0, color="0.6", linestyle="--")
    axis.set_yticks(range(len(variants)), [policy.partition(":")[2] for policy in variants])
    axis.invert_yaxis()
    axis.set_xlabel("mean latency below that of the default")
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def _map(results: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = mapped(results)
    for axis, (name, policy) in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
        cells = [list(by_load.values()) for by_load in by_slots(results).values()]
        rows = [[gain(cell, policy, ("fcfs",))[0] for cell in row] for row in cells]
        axis.imshow(rows, cmap="YlGn", vmin=0, vmax=0.8, aspect="auto")
        for y, row in enumerate(rows):
            for x, value in enumerate(row):
                axis.text(x, y, f"{100 * value:.0f}", ha="center", va="center", fontsize="small")
        axis.set_xticks(range(len(rows[0])), list(by_slots(results)["1"]))
        axis.set_yticks(range(len(rows)), list(by_slots(results)))
        axis.set_title(f"{name}, % below fcfs", loc="left", fontsize="medium")
        axis.set_xlabel("load")
    figure.axes[0].set_ylabel("slots")
    return figure


def by_slots(results: Mapping[str, Any]) -> dict[str, Loads]:
    """The map's rows; that of one slot was measured with all else."""
    return {"1": results["loads"]["mix"], **results["map"]}


def mapped(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(STAR, results["settings"]["readings"][STAR]), ("gittins", "gittins"), ("oracle", "oracle")]


def _named(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The policies of the tables: name on the page, and in the results."""
    readings = {policy: name for name, policy in results["settings"]["readings"].items()}
    first = next(iter(next(iter(results["loads"].values())).values()))
    return [(readings.get(policy, policy), policy) for policy in first]


# ---- the page and the table ----


def table(results: Mapping[str, Any]) -> str:
    """CSV: a row for each policy in each cell of each experiment but the errors, which the page has whole."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    below = [f"% below {base}" for base in (*MEAN_OF, "mlfq", "laps-sd")]
    writer.writerow(
        [
            "experiment",
            "kind or slots",
            "load",
            "policy",
            "mean s",
            "over fcfs",
            "p99 over fcfs",
            *below,
            "% below the three",
        ]
    )
    for experiment in ("loads", "tails", "ablations", "map"):
        for kind, loads in results[experiment].items():
            for load, cell in loads.items():
                for policy in cell:
                    bases = [(base,) for base in (*MEAN_OF, "mlfq", "laps-sd")] + [MEAN_OF]
                    gains = (percent(gain(cell, policy, some)) if set(some) <= set(cell) else "" for some in bases)
                    figures = (ratio(cell, policy, "fcfs"), ratio(cell, policy, "fcfs", "p99_s"))
                    mean = plain(interval_95(cell[policy]["mean_s"]), 1)
                    writer.writerow([experiment, kind, load, policy, mean, *map(plain, figures), *gains])
    return text.getvalue()


def render(
    results: Mapping[str, Any], decision: Mapping[str, Any] | None, worth: Mapping[str, Any] | None = None
) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    text = Path(__file__).with_name("paper.md.jinja").read_text()
    tools = (ratio, percent, plain, headline, against, estimates, nothing_to_gain, ablated, interval_95)
    reference = f"{results['settings']['reference_load']:g}"
    columns = {
        kind: loads[reference] for kind, loads in (results["loads"] | results["tails"]).items() if reference in loads
    }
    page: str = environment.from_string(text).render(
        **results,
        columns=columns,
        results=results,
        decision=decision,
        worth=worth,
        said=said,
        worth_lines=lines,
        goals_ms=GOALS_MS,
        scale=results["settings"]["scale"],
        named=_named(results),
        mean_of=MEAN_OF,
        star=results["settings"]["readings"][STAR],
        paper_error=PAPER_ERROR,
        **{tool.__name__: tool for tool in tools},
    )
    return page
