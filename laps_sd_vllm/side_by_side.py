"""The requests of the last minutes under several policies: a question in JSON on stdin, an answer on stdout. It runs as
a process of low priority beside vLLM, and decides nothing."""

import os
import sys
from math import fsum

from pydantic import TypeAdapter

from scheduler_service.sim.oracle import parts, simulated_policy
from scheduler_service.sim.results import percentile
from scheduler_service.sim.side_by_side import QUESTION, Question
from scheduler_service.sim.simulator import Trace, simulate

Figures = dict[str, float]  # seconds: mean and p99 of latency, and the longest pause between two deliveries
ANSWER: TypeAdapter[dict[str, Figures]] = TypeAdapter(dict[str, Figures])


def answer(question: Question) -> dict[str, Figures]:
    """By policy. Raises ValueError for a policy that there is not."""
    jobs, fleet = question.jobs, question.fleet
    return {
        name: figures(simulate(jobs, simulated_policy(*parts(name), jobs, fleet.reference_draft), fleet))
        for name in question.policies
    }


def figures(trace: Trace) -> Figures:
    return told([each.latency_s for each in trace.outcomes], max(trace.gaps_s, default=0.0))


def told(latencies_s: list[float], pause_s: float) -> Figures:
    """Of at least one request."""
    ordered = sorted(latencies_s)
    return {
        "mean_s": fsum(ordered) / max(1, len(ordered)),
        "p99_s": percentile(ordered, 0.99),
        "longest_pause_s": pause_s,
    }


def main() -> None:
    os.nice(19)  # serving goes first
    question = QUESTION.validate_json(sys.stdin.buffer.read())
    sys.stdout.buffer.write(ANSWER.dump_json(answer(question)))


if __name__ == "__main__":
    main()
