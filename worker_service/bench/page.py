"""docs/explanation/engine.md and its plot, made from a bench's record alone: `python -m worker_service.bench.page`.

Sentences that judge are chosen by the figures. The plot needs matplotlib, of the extra `lab`.
"""

import io
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import jinja2
import matplotlib as mpl
from matplotlib.figure import Figure

from worker_service.bench.record import PLAIN

LEVEL = 0.02  # so little more or less is neither ahead nor behind
Found = Mapping[str, Any]


# ---- figures ----


def batches(found: Found) -> list[int]:
    return list(dict.fromkeys(row["batch"] for row in found["rows"]))


def systems(found: Found) -> list[str]:
    return list(dict.fromkeys(row["system"] for row in found["rows"]))


def row(found: Found, system: str, batch: int) -> Found | None:
    return next((row for row in found["rows"] if (row["system"], row["batch"]) == (system, batch)), None)


def ratio(found: Found, base: str, batch: int) -> float | None:
    """Tokens per second of ours over those of `base`: the median of the repetitions, each on its own prompts."""
    ours, other = row(found, "ours", batch), row(found, base, batch)
    if ours is None or other is None:
        return None
    ratios: list[float] = [mine / theirs for mine, theirs in zip(ours["runs"], other["runs"], strict=True)]
    return median(ratios)


# ---- sentences ----


def verdicts(found: Found) -> Iterator[str]:
    """Against whom it is ahead, level and behind, and where."""
    for base in systems(found):
        if base == "ours":
            continue
        ratios = {batch: value for batch in batches(found) if (value := ratio(found, base, batch)) is not None}
        if base == PLAIN:  # where no drafts were chosen both are the same, and the rest is noise
            ratios = {batch: value for batch, value in ratios.items() if _drafts(found, batch)}
        where: dict[str, list[str]] = {"ahead": [], "level": [], "behind": []}
        for batch, value in ratios.items():
            place = "level" if abs(value - 1) <= LEVEL else "ahead" if value > 1 else "behind"
            where[place].append(f"{batch} ({value:.2f}x)")
        parts = [f"{place} at batch {', '.join(some)}" for place, some in where.items() if some]
        if parts:
            yield f"`{base}`: {'; '.join(parts)}."


def _drafts(found: Found, batch: int) -> bool:
    ours = row(found, "ours", batch)
    return ours is not None and ours["draft_len"] > 0


# ---- the plot and the page ----


def draw(found: Found) -> str:
    """SVG: tokens per second over batch size, all systems."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axis = figure.subplots()
    for system in systems(found):
        rows = [r for r in found["rows"] if r["system"] == system]
        rates = [r["tokens_per_s"] for r in rows]
        errors = [
            [rate - r["spread"][0] for rate, r in zip(rates, rows, strict=True)],
            [r["spread"][1] - rate for rate, r in zip(rates, rows, strict=True)],
        ]
        width = 2.5 if system == "ours" else 1.2
        axis.errorbar([r["batch"] for r in rows], rates, errors, label=system, marker=".", capsize=2, linewidth=width)
    plain = [r for r in found["rows"] if r["system"] == PLAIN]
    limits = [1e3 * r["batch"] / r["floor_ms"] for r in plain]
    axis.plot([r["batch"] for r in plain], limits, "--", color="grey", label="floor without speculation")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(batches(found), [str(batch) for batch in batches(found)])
    axis.set_xlabel("batch")
    axis.set_ylabel("output tokens/s, prefill included")
    axis.set_title(
        f"{found['model']}, {found['dtype']}, {found['machine']['processor']}", loc="left", fontsize="medium"
    )
    axis.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    axis.grid(alpha=0.3)
    return _svg(figure)


def _svg(figure: Figure) -> str:
    """Text stays text and ids depend on nothing, so that equal figures are equal files."""
    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "laps-sd"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def render(found: Found) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    text = Path(__file__).with_name("engine.md.jinja").read_text()
    tools = (batches, systems, row, verdicts)
    page: str = environment.from_string(text).render(
        found=found, plain=PLAIN, **{tool.__name__: tool for tool in tools}
    )
    return page


def main() -> None:
    """The record of docs/engine to its plot and docs/explanation/engine.md; another folder than docs may be named."""
    docs = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    found = json.loads((docs / "engine" / "bench.json").read_text())
    (docs / "engine" / "bench.svg").write_text(draw(found))
    page = docs / "explanation" / "engine.md"
    page.parent.mkdir(exist_ok=True)
    page.write_text(render(found))


if __name__ == "__main__":
    main()
