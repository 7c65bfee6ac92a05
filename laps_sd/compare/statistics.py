"""Ratios of mean latencies of policies that served the same requests, with bootstrap confidence intervals. Knows no
files."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000
BLOCKS = 12  # of a repetition at most; requests of a block met the same queue and are drawn together
CONFIDENCE = 0.95

Latencies = Sequence[NDArray[np.float64]]  # one array for each repetition, requests in order of arrival


@dataclass(frozen=True, slots=True)
class Ratio:
    """Mean latency of one policy divided by that of another, with its confidence interval."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """`lower` or `higher`; `same` if the interval includes 1."""
        return "lower" if self.high < 1 else "higher" if self.low > 1 else "same"


def ratio(ours: Latencies, base: Latencies, seed: int = 0, *, burst: bool = False) -> Ratio:
    """`ours[r][i]` and `base[r][i]` belong to the same request. Raises ValueError if their lengths differ.

    Moving-block bootstrap (Kuensch, Annals of Statistics 17, 1989): each repetition is resampled in blocks of
    consecutive requests, the same blocks for both policies. Percentile interval.

    `burst`: all requests arrived at once, so neighbours have nothing in common but their places in the queue. In order
    of arrival a block would be all early or all late, and the interval many times too wide. So requests are shuffled
    first, alike for both policies.
    """
    if [len(one) for one in ours] != [len(one) for one in base] or not sum(map(len, ours)):
        raise ValueError("no pairs of the same requests")
    rng = np.random.default_rng(seed)
    sums = np.zeros((2, RESAMPLES))
    for mine, theirs in zip(ours, base, strict=True):
        pair = np.stack([mine, theirs])
        sums += _resampled_sums(rng.permutation(pair, axis=1) if burst else pair, rng)
    drawn = sums[0] / sums[1]
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(drawn, [tail, 100 - tail])
    value = sum(float(one.sum()) for one in ours) / sum(float(one.sum()) for one in base)
    return Ratio(value, float(low), float(high))


def _resampled_sums(pair: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Sums of both rows of `pair`, shape (2, requests), over the same random blocks: shape (2, RESAMPLES)."""
    count = pair.shape[1]
    length = -(-count // BLOCKS)
    # Blocks go round from the end to the beginning, so that each request is in equally many.
    around = np.concatenate([np.zeros((2, 1)), np.cumsum(np.concatenate([pair, pair[:, :length]], axis=1), axis=1)], 1)
    blocks = around[:, length : length + count] - around[:, :count]
    starts = rng.integers(0, count, (RESAMPLES, -(-count // length)))  # where requests are few, fewer blocks hold them
    drawn: NDArray[np.float64] = blocks[:, starts].sum(axis=2)
    return drawn


def times_ms(latencies: Latencies) -> dict[str, float]:
    """Mean and percentiles over all repetitions."""
    every = np.concatenate(list(latencies))
    p50, p95, p99 = np.percentile(every, [50, 95, 99])
    return {"mean": float(every.mean()), "p50": float(p50), "p95": float(p95), "p99": float(p99)}


def quantiles_ms(latencies: Latencies) -> list[float]:
    """At 1 %, 3 %, ... 99 %."""
    found: list[float] = np.percentile(np.concatenate(list(latencies)), range(1, 100, 2)).round(1).tolist()
    return found


def by_kind(latencies: Latencies, kinds: Sequence[Sequence[str]]) -> dict[str, float]:
    """The mean latency of each kind of request. `kinds[r][i]` is the kind of `latencies[r][i]`."""
    every, kind = np.concatenate(list(latencies)), np.concatenate([np.asarray(some) for some in kinds])
    return {str(each): float(every[kind == each].mean()) for each in np.unique(kind)}
