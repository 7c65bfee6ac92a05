"""`python -m tests.vllm.in_steps_page`: of docs/benchmarks/vllm_steps.json, which `in_steps.py` writes, the table, the
chart and the sentence of docs/how-to/vllm.md. Needs matplotlib, of the extra `lab`."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from scheduler_service.sim import drawing

DOCS = Path(__file__).parents[2] / "docs"
MADE = r"(?<=<!-- made by `python -m tests.vllm.in_steps_page`: {} -->\n).*?(?=<!-- end -->)"
WORTH = 0.9  # of vLLM's own mean: what does not get below it is not worth what a step costs more
LOAD = 0.9  # of the sentence and the chart
KNOWN = {"learned": "learned", "bounded": "max_tokens exact", "nothing": "nothing"}
Row = dict[str, Any]


def _usual(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["known"] == "learned" and row["load"] == LOAD]


def leave_off(rows: Sequence[Row]) -> int | None:
    """From so many slots on the mean is not below WORTH of vLLM's own; None: it is at all that were tried."""
    few = sorted((row for row in _usual(rows) if row["slots"]), key=lambda row: row["slots"])
    pays = [row["ratio"]["mean"][0] < WORTH for row in few]
    since = next((number for number in range(len(few)) if not any(pays[number:])), None)
    return None if since is None else int(few[since]["slots"])


def sentence(rows: Sequence[Row]) -> str:
    slots = leave_off(rows)
    if slots is None:
        most = max(row["slots"] or 0 for row in rows)
        return f"With up to {most} running at once it paid in these runs; beyond that it was not tried."
    return f"**With {slots} or more running at once, leave it off**, unless KV memory is short."


def table(rows: Sequence[Row]) -> str:
    lines = [
        "|queue|load|lengths known from|mean|p99|p99 first token|p99 longest pause|tokens a step, burst|",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        stock, ours = row["stock"], row["ours"]
        pairs = [f"{ours[name]:.0f} / {stock[name]:.0f}" for name in ("p99", "p99 first token", "p99 longest pause")]
        ratio, half = row["ratio"]["mean"]
        mean = f"{ours['mean']:.0f} / {stock['mean']:.0f} = {ratio:.2f} ± {half:.2f}"
        burst = row["burst"]["ours"] / row["burst"]["stock"]
        lines.append(
            "|".join(["", row["name"], str(row["load"]), KNOWN[row["known"]], mean, *pairs, f"{burst:.2f}", ""])
        )
    return "\n".join(lines)


def chart(rows: Sequence[Row]) -> Figure:
    """Means over vLLM's own, with their intervals, at LOAD and learned lengths."""
    shown = _usual(rows)
    figure = Figure(figsize=(drawing.WIDTH, 0.8 + 0.32 * len(shown)), layout="constrained")
    axis = figure.subplots()
    values = [row["ratio"]["mean"][0] for row in shown]
    colors = ["#0d9488" if value < WORTH else "#94a3b8" for value in values]
    halves = [row["ratio"]["mean"][1] for row in shown]
    axis.barh([row["name"] for row in shown], values, xerr=halves, color=colors, error_kw={"capsize": 3})
    for place, value in enumerate(values):
        axis.text(0.02, place, f"{value:.2f}", va="center", color="white", fontweight="bold")
    axis.axvline(1, color="grey", linewidth=0.8)
    axis.invert_yaxis()
    axis.set_xlabel("mean latency over that of vLLM's own order, in steps, load " + str(LOAD))
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def opening(rows: Sequence[Row]) -> str:
    return f"""{sentence(rows)}

![Mean latency by how requests queue](../benchmarks/vllm_steps.svg)
"""


def figures(rows: Sequence[Row]) -> str:
    requests, seeds = rows[0]["requests"], rows[0]["seeds"]
    return f"""The chart and this table are **counted in steps on a toy executor, no model and no clock**: vLLM's own
engine, scheduler and blocks, loads as shares of what its own order makes at its best `max_num_seqs`, four drafts,
{requests} requests a row in {seeds} runs, answers of four kinds with medians of 12, 40, 150 and 400 tokens, 512 at
most. Each pair is LAPS-SD / vLLM's own, p99 the mean over the runs; intervals are 95 % over the runs. A step counts one
however full it is, so what ordering costs is not in them. The last column: how many tokens a step a burst makes, over
vLLM's own. Above load 1 the queue grows as long as requests come.

{table(rows)}

Made by `make vllm-steps`: `python -m tests.vllm.in_steps` in vLLM's environment.
"""


def main() -> None:
    rows = json.loads((DOCS / "benchmarks" / "vllm_steps.json").read_text())
    (DOCS / "benchmarks" / "vllm_steps.svg").write_text(drawing.file_of(chart(rows)))
    page = DOCS / "how-to" / "vllm.md"
    text = page.read_text()
    for name, made in {"when": opening(rows), "steps": figures(rows)}.items():
        text = re.sub(MADE.format(name), lambda _, made=made: made, text, count=1, flags=re.DOTALL)
    page.write_text(text)


if __name__ == "__main__":
    main()
