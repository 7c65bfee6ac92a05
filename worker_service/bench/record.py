"""From answers to the record of a bench: plain data. Nothing is run or drawn here."""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from worker_service.bench.floor import Machine, Work, floor_s
from worker_service.bench.race import Answer, Batch, Rounds
from worker_service.engine import native

PLAIN = "ours-plain"


class Heat(NamedTuple):
    """All systems at one batch size. Their answers are those to `batches`, all repetitions in order."""

    batch: int
    draft_len: int  # of ours
    batches: Sequence[Batch]
    repetitions: int
    answers: Mapping[str, Sequence[Answer]]


def figures(heats: Sequence[Heat], machine: Machine, work: Work) -> dict[str, Any]:
    """`rows` and what stands beside them; the share outside forward passes is the largest of all batches."""
    rows = [_row(heat, system, machine, work) for heat in heats for system in heat.answers]
    shares = [row["outside_forward_share"] for row in rows if row["system"] == "ours"]
    return {"rows": rows, "outside_forward_share": max(shares, default=None), "floor": asdict(machine)}


def _row(heat: Heat, system: str, machine: Machine, work: Work) -> dict[str, Any]:
    """tokens_per_s: median over the repetitions, prefill included; spread: the least and the greatest.

    Of a system that does not tell its rounds there is no more.
    """
    answers = heat.answers[system]
    each = len(answers) // heat.repetitions
    runs = [rate(answers[i * each : (i + 1) * each]) for i in range(heat.repetitions)]
    total = sum((answer.rounds for answer in answers), Rounds())
    found: dict[str, Any] = {
        "system": system,
        "batch": heat.batch,
        "tokens_per_s": median(runs),
        "spread": [min(runs), max(runs)],
        "runs": runs,
        "acceptance_length": total.acceptance_length if total.passes else None,
    }
    if total.verify_s:
        lengths = [len(prompt) for batch in heat.batches for prompt in batch]
        context = sum(lengths) / len(lengths) + answers[0].tokens / len(answers[0].outputs) / 2
        requests = total.rows / total.passes
        tokens = (total.rows + total.drafted + total.branched) / total.passes
        floor_ms = 1e3 * floor_s(machine, work, requests, tokens, context)
        # Times are medians over the answers: one that the machine slept through would ruin any sum.
        rounds = [answer.rounds for answer in answers if answer.rounds.passes]
        step_ms = 1e3 * median(r.seconds / r.passes for r in rounds)
        verify_ms = 1e3 * median(r.verify_s / r.passes for r in rounds)
        found |= {
            "draft_len": heat.draft_len if system == "ours" else 0,
            "accepted_per_drafted": total.accepted_per_drafted if total.drafted else None,
            "drafted_per_round": total.drafted / total.rows,
            "outside_forward_share": median(r.outside_share for r in rounds),
            "draft_token_share": median(r.draft_token_share for r in rounds if r.drafted) if total.drafted else None,
            "step_ms": step_ms,
            "draft_ms": 1e3 * median(r.draft_s / r.passes for r in rounds),
            "verify_ms": verify_ms,
            "floor_ms": floor_ms,
            "step_over_floor": step_ms / floor_ms,
            "verify_over_floor": verify_ms / floor_ms,
        }
    return found


def rate(answers: Sequence[Answer]) -> float:
    """Tokens per second of all of them, one after the other."""
    return sum(answer.tokens for answer in answers) / sum(answer.seconds for answer in answers)


def environment(device: torch.device, threads: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "processor": _processor(),
        "threads": threads or torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "native_kernels": device.type == "cpu" and native.kernels() is not None,
    }
    if device.type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(device)
    return found


def versions() -> dict[str, str]:
    found = {name: version(name) for name in ("torch", "transformers")}
    return found | {"python": platform.python_version(), "laps-sd": version("laps-sd")}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.machine())}, {os.cpu_count()} cores"


def command() -> str:
    """As it is typed: `laps-sd bench engine` has the two words among its arguments, `python -m` has not."""
    words = sys.argv[1:]
    return " ".join(["laps-sd bench engine", *(words[2:] if words[:2] == ["bench", "engine"] else words)])
