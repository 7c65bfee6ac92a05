"""`python -m tests.vllm.compare_page`: the table of docs/how-to/vllm.md, in seconds, of the figures of `compare.py`.
Neither vLLM nor the model is needed here."""

import json
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler_service.sim.results import GOOD_TPOT_MS, GOOD_TTFT_MS, interval_95

DOCS = Path(__file__).parents[2] / "docs"
FIGURES, PAGE = DOCS / "benchmarks" / "vllm.json", DOCS / "how-to" / "vllm.md"
MADE = re.compile(r"(?<=<!-- made by `python -m tests.vllm.compare_page` -->\n).*?(?=<!-- end -->)", re.DOTALL)
RESAMPLES, BLOCKS = 1000, 12  # blocks into which a run is divided
Served = NDArray[np.float64]  # requests in order of arrival x (arrival, first, last, pause, tokens), in seconds
COLUMNS = ("arrival", "first", "last", "pause", "tokens")


class Key(NamedTuple):
    """One run. `cell`: its name, or `best`, `saturation`, `watching`. `load`: None: all requests come at once."""

    cell: str
    seqs: int
    kind: str
    load: float | None = None
    number: int = 0


Lines = dict[Key, dict[str, Any]]


def _good(served: Served) -> float:
    at, first, last, _, tokens = served.T
    good = (first - at <= GOOD_TTFT_MS / 1e3) & (last - first <= GOOD_TPOT_MS / 1e3 * (tokens - 1))
    return 100 * float(good.mean())


OF_ALL: dict[str, Callable[[Served], float]] = {
    "mean s": lambda all: float((all[:, 2] - all[:, 0]).mean()),
    "p99 s": lambda all: float(np.percentile(all[:, 2] - all[:, 0], 99)),
    "p99 first token s": lambda all: float(np.percentile(all[:, 1] - all[:, 0], 99)),
    "p99 longest pause s": lambda all: float(np.percentile(all[:, 3], 99)),
    "tokens/s": lambda all: float(all[:, 4].sum() / all[:, 2].max()),
    "good answers %": _good,
}


def told(line: dict[str, Any]) -> str:
    """A run in a few words."""
    if "tokens" not in line:
        return ", ".join(f"{name} {value:.3g}" for name, value in line.items() if isinstance(value, float))
    return ", ".join(f"{name} {figure(_array(line)):.3g}" for name, figure in OF_ALL.items())


def _array(line: dict[str, Any]) -> Served:
    return np.array([line[name] for name in COLUMNS]).T


def summary(lines: Lines, code: str = "") -> dict[str, Any]:
    """Of the runs of which there are pairs. `code`: a digest of what made them."""
    bursts = [_burst(lines, *each) for each in (("saturation", "observe"), ("saturation", "order"))]
    watched = sorted({key.seqs for key in lines if key.cell == "watching"})
    bursts += [_burst(lines, "watching", "observe", seqs) for seqs in watched]
    loads = dict.fromkeys((key.cell, key.load) for key in lines if key.load is not None)
    return {
        "machine": machine(),
        "dtype": "float32",  # of tests/vllm/turns.py
        "best": {str(key.seqs): line["tokens_per_s"] for key, line in lines.items() if key.cell == "best"},
        "code": code,
        "bursts": [each | {"code": code} for each in bursts if each],
        "loads": [
            each | {"code": code} for cell, load in loads if load is not None and (each := _load(lines, cell, load))
        ],
    }


def machine() -> str:
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else platform.machine()


def _burst(lines: Lines, part: str, kind: str, seqs: int | None = None) -> dict[str, Any]:
    """Empty where there is no pair of rounds."""
    ours = {
        key: line for key, line in lines.items() if (key.cell, key.kind) == (part, kind) and seqs in (None, key.seqs)
    }
    pairs = [
        (line["tokens_per_s"], lines[stock]["tokens_per_s"], key.seqs)
        for key, line in ours.items()
        if seqs in (None, key.seqs) and (stock := key._replace(kind="stock")) in lines
    ]
    if len(pairs) < 2:
        return {}
    mine, theirs, all_seqs = zip(*pairs, strict=True)
    ratio, half = interval_95([one / other for one, other, _ in pairs])
    return {
        "seqs": all_seqs[0], "kind": kind, "rounds": len(pairs), "stock": float(np.mean(theirs)),
        "ours": float(np.mean(mine)), "ratio": [ratio, ratio - half, ratio + half], "fell_back": _fell(ours.values()),
    }  # fmt: skip


def _load(lines: Lines, cell: str, load: float) -> dict[str, Any]:
    runs = [
        (line, lines[ours])
        for key, line in lines.items()
        if (key.cell, key.load, key.kind) == (cell, load, "stock") and (ours := key._replace(kind="order")) in lines
    ]
    if not runs:
        return {}
    pairs = [(_array(stock), _array(ours)) for stock, ours in runs]
    figures: dict[str, dict[str, Any]] = {}
    for name, figure in OF_ALL.items():
        stock, ours = (float(np.mean([figure(pair[which]) for pair in pairs])) for which in (0, 1))
        figures[name] = {"stock": stock, "ours": ours, "ratio": _ratio(figure, stock, ours, pairs)}
    for name, field, unit in (("load as it came", "came", 1), ("somebody waits % of the time", "waited", 100)):
        stock, ours = (unit * float(np.mean([pair[which][field] for pair in runs])) for which in (0, 1))
        figures[name] = {"stock": stock, "ours": ours, "ratio": None}
    requests = sum(len(stock) for stock, _ in pairs)
    return {
        "cell": cell, "load": load, "requests": requests, "runs": len(pairs), "figures": figures,
        "fell_back": _fell(ours for _, ours in runs),
    }  # fmt: skip


def _fell(lines: Iterable[dict[str, Any]]) -> list[str]:
    return sorted({line["fell_back"] for line in lines if "fell_back" in line})


def _ratio(
    figure: Callable[[Served], float], stock: float, ours: float, pairs: Sequence[tuple[Served, Served]]
) -> list[float] | None:
    """Of the means over runs, with its 95 % interval: each run is drawn again in blocks of consecutive requests, which
    met the same queue, the same blocks for both orders (Kuensch, Annals of Statistics 17, 1989)."""
    if not stock:
        return None
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(RESAMPLES):
        sums = np.zeros(2)
        for theirs, mine in pairs:
            length = -(-len(theirs) // BLOCKS)
            starts = rng.integers(0, len(theirs), BLOCKS)
            picked = (starts[:, None] + np.arange(length)).ravel() % len(theirs)
            sums += figure(theirs[picked]), figure(mine[picked])
        drawn.append(sums[1] / max(sums[0], 1e-9))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return [ours / stock, float(low), float(high)]


def section(figures: dict[str, Any]) -> str:
    """Rows that older code made say so."""
    rows = figures["bursts"] + figures["loads"]
    if not rows:
        return "Not measured yet.\n"
    lines = ["|requests come|what|vLLM|LAPS-SD|LAPS-SD / vLLM|", "|---|---|---|---|---|"]
    for each in figures["bursts"]:
        does = {"observe": "tokens/s, watching", "order": "tokens/s, ordering"}[each["kind"]]
        where = f"all at once, `max_num_seqs` {each['seqs']}, {each['rounds']} times" + _age(each, figures)
        lines.append(f"|{where}|{does}|{each['stock']:.0f}|{each['ours']:.0f}|{_shown(each['ratio'], 3)}|")
    for each in figures["loads"]:
        where = f"{each['cell']}, load {each['load']}, {each['requests']} requests in {each['runs']} runs" + _age(
            each, figures
        )
        for name, both in each["figures"].items():
            lines.append(f"|{where}|{name}|{both['stock']:.3g}|{both['ours']:.3g}|{_shown(both['ratio'], 2)}|")
            where = ""
    table = "\n".join(lines)
    why_fell = sorted({why for each in rows for why in each["fell_back"]})
    fell = "".join(f"LAPS-SD left the order to vLLM in a run: {why}.\n" for why in why_fell)
    rates = ", ".join(f"{seqs}: {rate:.0f}" for seqs, rate in figures["best"].items())
    best = f" vLLM's own tokens\na second by `max_num_seqs`: {rates}." if rates else ""
    return f"""{table}

{fell}SmolLM2-135M in {figures["dtype"]} on one core ({figures["machine"]}), n-gram drafts, one engine on which both
schedulers take turns. Load 1 brings as many tokens a second as vLLM's own order makes while somebody waits.{best}
Prompts are the project's own, answers bounded by 16 to 256 tokens; all at once: of 7 to 64 tokens, by earlier
code to 128. A good answer begins within a second, and goes on with 100 ms a token. In brackets 95 % intervals. Made by
`make vllm-figures`.
"""


def _age(row: dict[str, Any], figures: dict[str, Any]) -> str:
    return "" if row["code"] == figures["code"] else " (earlier code)"


def _shown(ratio: list[float] | None, digits: int) -> str:
    if ratio is None:
        return ""
    value, low, high = (f"{each:.{digits}f}" for each in ratio)
    return f"{value} ({low} to {high})"


def write_page(lines: Lines, code: str) -> None:
    """The page keeps those figures that were not measured anew."""
    figures = beside_earlier(summary(lines, code), json.loads(FIGURES.read_text()))
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    main()


def beside_earlier(figures: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """`figures`, with those of the `earlier` ones that they lack, if the machine was the same."""
    if figures["machine"] != earlier["machine"]:
        return figures
    both = dict(figures, best=figures["best"] or earlier["best"])
    for part, fields in (("bursts", ("seqs", "kind")), ("loads", ("cell", "load"))):
        measured = {tuple(each[name] for name in fields) for each in figures[part]}
        both[part] = figures[part] + [
            each for each in earlier[part] if tuple(each[name] for name in fields) not in measured
        ]
    return both


def main() -> None:
    figures = json.loads(FIGURES.read_text())
    PAGE.write_text(MADE.sub(lambda _: section(figures), PAGE.read_text(), count=1))


if __name__ == "__main__":
    main()
