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
    """All of it, for people; whatever a section did not come to is left out."""
    lines = [f"device: {found['sections'].get('machine', {}).get('device', found['asked_device'])} ({found['size']})"]
    for part in (_machine, _sections, _exactness, _bench, _graphs, _preemption, _families):
        try:
            lines += part(found["sections"])
        except Exception as error:  # what is in the JSON must not be lost for a table
            lines.append(f"no table of {part.__name__.removeprefix('_')}: {type(error).__name__}: {error}")
    return "\n".join(lines) + "\n"


def _machine(sections: Found) -> list[str]:
    machine = sections.get("machine", {})
    measured = {dtype: machine[dtype] for dtype in ("bfloat16", "float32") if dtype in machine}
    return [f"{dtype}: {m['gb_per_s']} GB/s read, {m['tflop_per_s']} TFLOP/s" for dtype, m in measured.items()]


def _sections(sections: Found) -> list[str]:
    lines = ["", *(line(name, section) for name, section in sections.items())]
    for name, section in sections.items():
        lines += [f"  WRONG in {name}: {problem}" for problem in section.get("wrong", ())]
    return lines


def _exactness(sections: Found) -> list[str]:
    rows = [row for name in ("exactness", "graphs") for row in sections.get(name, {}).get("drafters", ())]
    lines = ["", _row("tokens unlike plain decoding", "dtype", "share")] if rows else []
    return lines + [_row(row["drafter"], row["dtype"], f"{row['tokens_that_differ']:.2%}") for row in rows]


def _preemption(sections: Found) -> list[str]:
    rows = sections.get("preemption", {}).get("rows", ())
    heads = ("away ms", "back ms", "step ms", "prefill ms", "away GB/s", "back GB/s")
    names = ("away_ms", "back_ms", "step_ms", "prefill_ms", "away_gb_per_s", "back_gb_per_s")
    lines = ["", _row("preemption", *heads)] if rows else []
    return lines + [_row(row["way"], *(_number(row.get(name)) for name in names)) for row in rows]


def _families(sections: Found) -> list[str]:
    words, found = ("works", "refused", "WRONG", "CRASHES"), sections.get("families", {})
    return ["", "families: " + ", ".join(f"{found.get(word, 0)} {word}" for word in words)] if found else []


def _graphs(sections: Found) -> list[str]:
    lines = _bench({"bench": sections.get("graphs", {})})
    return ["", "The same with passes as CUDA graphs:", *lines[1:]] if lines else []


def _bench(sections: Found) -> list[str]:
    bench = sections.get("bench", {})
    if not any(bench.get(name) for name in ("rows", "mixed", "sampled")):
        return []
    heads = ("batch", "tokens/s", "step ms", "floor ms", "over floor", "outside", "tokens/round", "GB")
    lines = ["", _row("system", *heads)]
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
