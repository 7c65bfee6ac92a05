"""What a simulation amounts to, under the names that `vllm bench serve` uses. Computes figures; draws no plots."""

import math
import statistics
from collections.abc import Iterable, Sequence

from scheduler_service.sim.simulator import Trace

T_95 = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # two-sided, by degrees of freedom

# Within these an answer comes as a person in a chat reads: the first token within a second, then ten a second.
GOOD_TTFT_MS, GOOD_TPOT_MS = 1000.0, 100.0


def interval_95(values: Sequence[float]) -> tuple[float, float]:
    """The mean of independent runs and the half-width of its 95 % interval (Student's t); nan for a single run."""
    n = len(values)
    half = T_95[min(n - 1, len(T_95) - 1)] * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return statistics.fmean(values), half


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of an ordered sequence, interpolated between its neighbours; 0 if there are none."""
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def is_good(ttft_ms: float, e2el_ms: float, tokens: int) -> bool:
    """Whether an answer of so many tokens came in time, the first token and the others on average. A live answer ends a
    little after its only token."""
    return ttft_ms <= GOOD_TTFT_MS and (tokens < 2 or e2el_ms - ttft_ms <= GOOD_TPOT_MS * (tokens - 1))


def summarise(trace: Trace) -> dict[str, float]:
    """Times in milliseconds but for `duration` (seconds, first arrival to last end); acceptance rate in per cent.
    `pause`: of each request the longest gap between two outputs, which vLLM does not report. `good_share`: of all
    requests, those that were answered as `is_good` says."""
    outcomes = trace.outcomes
    records = [outcome.record for outcome in outcomes]
    begin = min((outcome.job.arrival_s for outcome in outcomes), default=0.0)
    duration = max((outcome.end_s for outcome in outcomes), default=0.0) - begin
    tokens = sum(record.emitted for record in records)
    drafted = sum(record.acceptance.drafted for record in records)
    accepted = sum(record.acceptance.accepted for record in records)
    good = sum(
        is_good(1e3 * (outcome.first_token_s - outcome.job.arrival_s), 1e3 * outcome.latency_s, outcome.record.emitted)
        for outcome in outcomes
    )
    return {
        "completed": len(outcomes),
        "failed": len(trace.failed),
        "duration": duration,
        "total_input_tokens": sum(outcome.job.prompt_tokens for outcome in outcomes),
        "total_output_tokens": tokens,
        "request_throughput": len(outcomes) / duration if duration else 0.0,
        "output_throughput": tokens / duration if duration else 0.0,
        **times_ms("ttft", (outcome.first_token_s - outcome.job.arrival_s for outcome in outcomes)),
        **times_ms(
            "tpot",
            (
                (outcome.end_s - outcome.first_token_s) / (outcome.record.emitted - 1)
                for outcome in outcomes
                if outcome.record.emitted > 1
            ),
        ),
        **times_ms("itl", trace.gaps_s),
        **times_ms("pause", (outcome.longest_gap_s for outcome in outcomes)),
        **times_ms("e2el", (outcome.latency_s for outcome in outcomes)),
        "good_share": good / max(1, len(outcomes) + len(trace.failed) + len(trace.refused)),
        "preemptions_per_request": sum(record.preemptions for record in records) / max(1, len(records)),
        "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else 0.0,
        "spec_decode_acceptance_length": 1 + accepted / trace.drafts if trace.drafts else 1.0,
        "spec_decode_num_drafts": trace.drafts,
    }


def times_ms(name: str, seconds: Iterable[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles, as `vllm bench serve` names them; 0 if there are none."""
    ordered = sorted(1e3 * second for second in seconds)
    count = max(1, len(ordered))
    mean = math.fsum(ordered) / count
    return {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": percentile(ordered, 0.5),
        f"std_{name}_ms": math.sqrt(math.fsum((each - mean) ** 2 for each in ordered) / count),
        f"p90_{name}_ms": percentile(ordered, 0.9),
        f"p99_{name}_ms": percentile(ordered, 0.99),
    }
