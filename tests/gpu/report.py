"""The table of a check, from what its sections found. Nothing is measured here."""

from collections.abc import Mapping
from typing import Any

Found = Mapping[str, Any]


def good(found: Found) -> bool:
    """Whether every section ended and nothing is wrong."""
    return all(each.get("state") == "ended" and not each.get("wrong") for each in found["sections"].values())


def line(name: str, section: Found) -> str:
    """A section in one line, as it ends."""
    wrong = f", {len(section['wrong'])} wrong" if section.get("wrong") else ""
    stopped = f", {section['stopped']}" if section.get("stopped") else ""
    return f"{name}: {section.get('state')} after {section.get('seconds', 0)} s{wrong}{stopped}"


def table(found: Found) -> str:
    """All of it, for people."""
    sections = found["sections"]
    machine = sections.get("machine", {})
    lines = [f"device: {machine.get('device', found['asked_device'])} ({found['size']})"]
    measured = {dtype: machine[dtype] for dtype in ("bfloat16", "float32") if dtype in machine}
    lines += [f"{dtype}: {m['gb_per_s']} GB/s read, {m['tflop_per_s']} TFLOP/s" for dtype, m in measured.items()]
    lines += ["", *(line(name, section) for name, section in sections.items())]
    for name, section in sections.items():
        lines += [f"  WRONG in {name}: {problem}" for problem in section.get("wrong", ())]
    if rows := sections.get("exactness", {}).get("drafters"):
        lines += ["", _row("tokens unlike plain decoding", "dtype", "share")]
        lines += [_row(row["drafter"], row["dtype"], f"{row['tokens_that_differ']:.2%}") for row in rows]
    if bench := sections.get("bench", {}):
        lines += ["", *_bench(bench)]
    if rows := sections.get("preemption", {}).get("rows"):
        lines += ["", _row("preemption", "away ms", "back ms", "step ms", "prefill ms", "away GB/s", "back GB/s")]
        for row in rows:
            names = ("away_ms", "back_ms", "step_ms", "prefill_ms", "away_gb_per_s", "back_gb_per_s")
            lines.append(_row(row["way"], *(_number(row.get(name)) for name in names)))
    if families := sections.get("families", {}):
        words = ("works", "refused", "WRONG", "CRASHES")
        lines += ["", "families: " + ", ".join(f"{families.get(word, 0)} {word}" for word in words)]
    return "\n".join(lines) + "\n"


def _bench(bench: Found) -> list[str]:
    lines = [_row("system", "batch", "tokens/s", "step ms", "floor ms", "over floor", "outside", "tokens/round", "GB")]
    lines += [
        _row(
            row["system"],
            row["batch"],
            _number(row["tokens_per_s"]),
            *(_number(row.get(name)) for name in ("step_ms", "floor_ms", "step_over_floor")),
            f"{row.get('outside_forward_share') or 0:.1%}",
            _number(row.get("acceptance_length")),
            _number(row.get("peak_gb")),
        )
        for row in sorted(bench.get("rows", ()), key=lambda row: (row["batch"], row["system"]))
    ]
    if mixed := bench.get("mixed"):
        numbers = (_number(mixed[name]) for name in ("step_ms", "floor_ms", "step_over_floor"))
        lines.append(_row("one long", mixed["batch"], "", *numbers, "", "", _number(mixed["peak_gb"])))
    if sampled := bench.get("sampled"):
        share, waits = f"{sampled['outside_share']:.1%}", sampled.get("waits")
        share += "" if waits is None else f", {waits} waits a step"
        lines.append(_row("sampled", sampled["batch"], "", _number(sampled["step_ms"]), "", "", share))
    return lines


def _row(first: object, *others: object) -> str:
    return f"{first!s:30}" + "".join(f"{other!s:>13}" for other in others)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
