"""Short ways to make settings, and runs as a folder keeps them, without a service."""

from typing import Any

from laps_sd.compare.design import BURST, Run, Settings

SETTINGS = Settings(
    model="m",
    dtype="auto",
    drafter="default",
    draft_len=4,
    requests=12,
    max_tokens=(4, 8),
    paragraphs=("chat",),
    taught=40,
    seed=0,
    pace=None,
    prompts="p",
    code="c",
)


def found(run: Run, latencies_s: list[float], *, faults: tuple[str, ...] = (), tokens: int = 5) -> dict[str, Any]:
    """A run whose requests, a second apart, took that long; one token a round of 10 ms."""
    requests = [
        {
            "category": ("chat", "code")[index % 2],
            "due_s": 0.0 if run.cell.load == BURST else float(index),
            "ttft_ms": 1.0,
            "e2el_ms": 1e3 * latency_s,
            "input_tokens": 1,
            "output_tokens": tokens,
            "max_tokens": 8,
            "preemptions": 0,
            "error": "",
            "drafted": [0] * tokens,
            "accepted": [0] * tokens,
            "expected": {},
            "steady_s": [0.0 if run.cell.load == BURST else float(index), latency_s],
        }
        for index, latency_s in enumerate(latencies_s)
    ]
    return {
        "run": run.as_json(),
        "results": {
            "total_output_tokens": 480,
            "request_throughput": 1.0,
            "duration": 2.0,
            "output_throughput": 5.0,
            "preemptions_per_request": 0.0,
        }
        | {"mean_e2el_ms": 1e3 * sum(latencies_s) / len(latencies_s)},
        "conditions": {},
        "faults": list(faults),
        "scheduler": {"idle_share": 0.0, "report_to_command_p99_ms": 1.0},
        "predictor": {"explained": 0.5},
        "kv_tokens": 1000,
        "steps": [[0, 1, 1, 0, 0, 100, 1.0]],
        "requests": requests,
        "capacity": 1.0,
        "latest_s": None,
        "took_s": 1.0,
        "machine": {"processor": "abacus", "cores": 2},
        "versions": {"python": "3"},
    }
