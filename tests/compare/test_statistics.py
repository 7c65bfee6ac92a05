"""Ratios of mean latency and their intervals."""

import numpy as np
import pytest
from numpy.typing import NDArray

from laps_sd.compare import statistics
from laps_sd.compare.statistics import ratio


def queueing(seed: int, count: int = 600) -> NDArray[np.float64]:
    """Latencies that depend on their neighbours', as in a queue."""
    rng = np.random.default_rng(seed)
    walk = np.convolve(rng.normal(size=count + 19), np.ones(20) / 20, "valid")
    return np.asarray(np.exp(walk))


def test_equal_latencies_do_not_differ() -> None:
    one = [queueing(1)]
    found = ratio(one, one)
    assert (found.value, found.low, found.high, found.verdict) == (1, 1, 1, "same")


def test_a_half_is_found_whatever_the_requests() -> None:
    base = [queueing(1), queueing(2)]
    found = ratio([one / 2 for one in base], base)
    assert found.value == found.low == found.high == pytest.approx(0.5)
    assert found.verdict == "lower"
    assert ratio(base, [one / 2 for one in base]).verdict == "higher"


def test_requests_count_once_each_however_long_the_repetition() -> None:
    found = ratio([np.array([1.0] * 30), np.array([4.0] * 10)], [np.array([2.0] * 30), np.array([4.0] * 10)])
    assert found.value == pytest.approx(70 / 100)


def test_policies_of_equal_mean_are_the_same_in_nearly_all_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 500)
    verdicts = [
        ratio([queueing(2 * i), queueing(900 + i)], [queueing(2 * i + 1), queueing(500 + i)]).verdict for i in range(60)
    ]
    assert verdicts.count("same") >= 48  # 50; with neighbours drawn one by one it would be 17


def test_few_requests_have_a_wider_interval_than_twice_as_many() -> None:
    """By 1.26; with as many blocks for both it would be 0.96."""

    def width(count: int) -> float:
        drawn = (np.random.default_rng(seed).exponential(size=count) for seed in range(40))
        return float(np.mean([(found := ratio([one], [np.ones(count)])).high - found.low for one in drawn]))

    assert width(13) > 1.15 * width(24)


def test_other_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="same requests"):
        ratio([np.ones(3)], [np.ones(4)])


def test_kinds_have_means_of_their_own() -> None:
    assert statistics.by_kind([np.array([1.0, 2.0, 3.0])], [["a", "b", "a"]]) == {"a": 2.0, "b": 2.0}


def test_the_order_of_a_burst_is_no_reason_for_a_wide_interval() -> None:
    """Each of a burst waits for those before it under one policy, and for chance under the other."""
    rng = np.random.default_rng(3)
    in_turn, by_chance = [np.arange(1.0, 601.0)], [rng.permutation(np.arange(1.0, 601.0))]
    ordered, burst = ratio(by_chance, in_turn), ratio(by_chance, in_turn, burst=True)
    assert burst.low < burst.value == ordered.value < burst.high
    assert burst.high - burst.low < (ordered.high - ordered.low) / 3
