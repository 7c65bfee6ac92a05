"""The figures of a load test, with the names and definitions of `vllm bench serve`. Prints nothing.

Two differences, both of which make latencies longer: they count from the time when a request was due, not when it was
sent; and the time that a request waits because of the cap on concurrency counts. Two figures are ours: `pause`, the
longest gap between two outputs of each request, and `good_share`, the share of requests that were answered in time.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from laps_sd.loadtest.record import Record
from scheduler_service.sim.results import is_good, percentile, times_ms

SLO_NAMES = ("ttft", "tpot", "e2el")
# The driver kept up if the p99 of how late requests were sent is at most so many seconds, or such a share of the mean
# latency, whichever is more. Otherwise the figures are those of the driver, not of the server.
MOST_LATE_S, MOST_LATE_SHARE = 0.025, 0.03
LATENESS = "p99_send_lateness_ms"


def parse_slos(texts: Iterable[str]) -> dict[str, float]:
    """`ttft:200` as {"ttft": 200.0}, in milliseconds. Raises ValueError."""
    slos = {}
    for text in texts:
        name, _, value = text.partition(":")
        if name not in SLO_NAMES:
            raise ValueError(f"{text!r}: {name!r} is none of {', '.join(SLO_NAMES)}")
        try:
            slos[name] = float(value)
        except ValueError:
            slos[name] = -1.0
        if not slos[name] > 0:
            raise ValueError(f"{text!r}: {value!r} is not a number of milliseconds above 0")
    return slos


def meets(record: Record, slos: Mapping[str, float]) -> bool:
    """Whether it completed within all of `slos` (milliseconds, by name). The TPOT of an answer of one token is 0."""
    took_s = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
    return record.completed and all(1e3 * took_s[name] <= most for name, most in slos.items())


def summarise(records: Sequence[Record], slos: Mapping[str, float], *, ours: bool) -> dict[str, Any]:
    """The figures of all records that count. `ours`: the server reports speculation and preemption.

    Times are in milliseconds, except `duration` in seconds, from the first arrival to the last end. The acceptance rate
    is in per cent.
    """
    measured = [record for record in records if record.measured]
    done = [record for record in measured if record.completed]
    begin = min((record.due_s for record in measured), default=0.0)
    duration = max((record.end_s for record in measured), default=0.0) - begin
    inputs, outputs = sum(r.input_tokens for r in done), sum(r.output_tokens for r in done)
    late_s = percentile(sorted(record.lateness_s for record in measured), 0.99)
    e2el = times_ms("e2el", (r.e2el_s for r in done))
    return {
        "completed": len(done),
        "failed": len(measured) - len(done),
        "duration": duration,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": _per(len(done), duration),
        **({"request_goodput": _per(sum(meets(r, slos) for r in measured), duration)} if slos else {}),
        "output_throughput": _per(outputs, duration),
        "total_token_throughput": _per(inputs + outputs, duration),
        "max_output_tokens_per_s": _busiest_second(done),
        "max_concurrent_requests": _most_at_once(measured),
        **times_ms("ttft", (r.ttft_s for r in done)),
        **times_ms("tpot", (tpot_s for r in done if (tpot_s := r.tpot_s) is not None)),
        **times_ms("itl", (gap_s for r in done for gap_s in r.itls_s)),
        **times_ms("pause", (r.pause_s for r in done)),
        **e2el,
        "good_share": sum(is_good(1e3 * r.ttft_s, 1e3 * r.e2el_s, r.output_tokens) for r in done)
        / max(1, len(measured)),
        **times_ms("client_queue", (r.free_s - r.due_s for r in done)),
        **(_speculation(done) if ours else {}),
        LATENESS: 1e3 * late_s,
        "kept_up": late_s <= max(MOST_LATE_S, MOST_LATE_SHARE * e2el["mean_e2el_ms"] / 1e3),
        "first_error": next((record.error for record in measured if record.error), None),
        "errors": dict(Counter(record.error.partition(":")[0] for record in measured if record.error)),
    }


def without_times(results: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a run in which nothing completed, with None for each latency: 0 would be the best of all."""
    return {name: None if name.endswith("_ms") and name != LATENESS else value for name, value in results.items()}


def detail(record: Record) -> dict[str, Any]:
    """One request for the JSON: its record and its latencies."""
    return asdict(record) | {
        "ttft_ms": 1e3 * record.ttft_s,
        "tpot_ms": None if record.tpot_s is None else 1e3 * record.tpot_s,
        "e2el_ms": 1e3 * record.e2el_s,
        "pause_ms": 1e3 * record.pause_s,
    }


def _per(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _speculation(done: Sequence[Record]) -> dict[str, Any]:
    drafts, drafted, accepted = (sum(getattr(r, name) for r in done) for name in ("drafts", "drafted", "accepted"))
    return {
        "preemptions_per_request": sum(r.preemptions for r in done) / max(1, len(done)),
        "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else 0.0,
        "spec_decode_acceptance_length": 1 + accepted / drafts if drafts else 1.0,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": _by_position(done),
    }


def _by_position(done: Iterable[Record]) -> list[float]:
    """The share of rounds with drafts in which the first, second, ... draft token was accepted."""
    drafts = [(drafted, accepted) for r in done for _, drafted, accepted in r.rounds if drafted]
    longest = max((drafted for drafted, _ in drafts), default=0)
    return [sum(accepted > i for _, accepted in drafts) / len(drafts) for i in range(longest)]


def _busiest_second(done: Iterable[Record]) -> int:
    seconds: Counter[int] = Counter()
    for record in done:
        for when_s, tokens in record.outputs:
            seconds[int(when_s)] += tokens
    return max(seconds.values(), default=0)


def _most_at_once(records: Iterable[Record]) -> int:
    """The most requests in flight at a time. One that ends when another is sent is not counted together with it."""
    changes = sorted(change for r in records for change in ((r.sent_s, 1), (r.end_s, -1)))
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
