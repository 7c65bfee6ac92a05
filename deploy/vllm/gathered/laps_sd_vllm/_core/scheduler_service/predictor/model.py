"""A fitted model: from a hashed row to a belief. Fast enough to be asked at every submission; it is not fitted here."""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laps_sd_vllm._core.scheduler_service.core.beliefs import Length
from laps_sd_vllm._core.scheduler_service.predictor.window import COLUMNS, Arrays, Example, Row

HEADS = 3  # location, scale and acceptance
NORMAL_90 = 1.2816  # the 90 % quantile of a standard normal
LONGEST = math.log(1e6)  # ln(tokens)
LEAST_SCALE = 0.05  # of ln(tokens): a length is not known better than to 5 %
TURN = (math.sqrt(5) - 1) / 2
SURPRISES = 400  # kept for the interval: enough for 2 % of coverage, few enough to follow a drift


@dataclass(frozen=True, slots=True)
class Model:
    """Three linear heads, `weights` (HEADS, COLUMNS) and `offsets` (HEADS,): the location of ln(tokens), were there no
    bound on them, the logarithm of its scale, and the accepted share of drafts. `surprises`: the errors of its last
    examples over their scale, each predicted without the example. `tells` (2,): whether it knows lengths, and
    acceptance, better than their means do. `finished`: requests that had been seen when it was fitted."""

    weights: NDArray[np.float32]
    offsets: NDArray[np.float64]
    surprises: NDArray[np.float64]
    tells: NDArray[np.bool_]
    trained_on: int
    finished: int

    def __post_init__(self) -> None:
        if (self.weights.shape, self.offsets.shape) != ((HEADS, COLUMNS), (HEADS,)) or self.surprises.ndim != 1:
            raise ValueError(f"model: weights of shape {self.weights.shape}, offsets of {self.offsets.shape}")
        if not all(np.isfinite(array).all() for array in (self.weights, self.offsets, self.surprises)):
            raise ValueError("model: a weight is not finite")
        if not 0 < len(self.surprises) <= SURPRISES or self.tells.shape != (2,):
            raise ValueError(f"model: {len(self.surprises)} surprises, tells of shape {self.tells.shape}")

    def arrays(self) -> Arrays:
        return {field.name: np.asarray(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def of_arrays(cls, arrays: Arrays) -> "Model":
        """Raises KeyError or ValueError."""
        parts: dict[str, Any] = {field.name: arrays[field.name] for field in fields(cls)}
        return cls(**parts | {name: int(parts[name]) for name in ("trained_on", "finished")})

    def raw(self, row: Row) -> tuple[float, float, float]:
        """Location and scale of ln(tokens), neither calibrated, and acceptance."""
        columns, values = row
        location, scale, acceptance = (self.weights[:, columns] @ values + self.offsets).tolist()
        return location, max(LEAST_SCALE, math.exp(min(scale, 2.0))), acceptance

    def surprise(self, example: Example) -> float:
        location, scale, _ = self.raw(example.row)
        return (math.log(example.tokens) - location) / scale


class Calibration:
    """The interval from what errors turned out to be: between the 10 % and the 90 % quantile of the last surprises lie
    80 % of the next ones, however wrong the model is, as long as it goes on being wrong in the same way.

    Source: split conformal prediction with errors scaled by their expected size, Lei et al., "Distribution-free
    predictive inference for regression", JASA 113, 2018, section 5.2. The window follows drift.
    """

    def __init__(self, surprises: Sequence[float]) -> None:
        self._turn = 0.0  # in [0, 1), evenly spread
        self._recent = list(surprises[-SURPRISES:])
        self._sorted = sorted(self._recent)

    def observe(self, surprise: float, *, cut: bool = False) -> None:
        """`cut`: it would have been larger, had the request not met its bound. It counts as one of the larger ones,
        each in its turn (redistribution to the right: Efron, "The two sample problem with censored data", 1967)."""
        if cut and (larger := len(self._sorted) - bisect.bisect_right(self._sorted, surprise)):
            self._turn = (self._turn + TURN) % 1
            surprise = self._sorted[-1 - int(self._turn * larger)]
        if len(self._recent) == SURPRISES:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.pop(0))]
        self._recent.append(surprise)
        bisect.insort(self._sorted, surprise)

    @property
    def recent(self) -> Sequence[float]:
        return self._recent

    def length(self, location: float, scale: float) -> Length:
        """The log-normal whose 10 % and 90 % quantiles are those of the interval, from what the model says raw."""
        n = len(self._sorted)
        rank = max(1, math.floor(0.1 * (n + 1)))
        low, high = self._sorted[rank - 1], self._sorted[n - rank]
        location = min(max(0.0, location + scale * (low + high) / 2), LONGEST)
        spread = min(max(LEAST_SCALE, scale * (high - low) / 2 / NORMAL_90), 3.0)
        return Length(location, spread)
