"""How fast a worker may be: as fast as it can, or like a device whose rounds always take what a profile says. No
decision lives here, and no RPC."""

import math
from collections.abc import Callable
from dataclasses import astuple, replace
from time import perf_counter, sleep
from typing import Annotated

from pydantic import AfterValidator

from worker_service.engine.types import CostProfile, StepResult


def possible(cost: CostProfile) -> CostProfile:
    """Raises ValueError if no device's rounds could cost that."""
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in astuple(cost)):
        raise ValueError("seconds are finite and not negative")
    return cost


PossibleCost = Annotated[CostProfile, AfterValidator(possible)]


class Pace:
    """With `cost` None rounds end when they are done. For comparisons: a shared machine is now faster and now slower,
    and near saturation a few hundredths of that weigh more than what is compared."""

    def __init__(
        self,
        cost: CostProfile | None = None,
        clock: Callable[[], float] = perf_counter,
        sleep: Callable[[float], None] = sleep,
    ) -> None:
        self._cost, self._clock, self._sleep = cost, clock, sleep
        self._ended = self._due = 0.0

    def profile(self, measured: CostProfile) -> CostProfile:
        """What rounds cost, which warm-up has measured."""
        return replace(self._cost, offload_block_s=measured.offload_block_s) if self._cost else measured

    def hold(self, begun: float, result: StepResult) -> tuple[StepResult, float]:
        """Return when a round that began at `begun` is due to end, or at once if that is past.

        Its result, in which the wait is part of the forward pass, and its end, where the next one begins if that need
        not wait for anything. What a round was late those make up for that follow so.
        """
        waited_s = 0.0
        if self._cost:
            ran = [row for row in result.rows if row.skipped is None]
            self._due = self._due if begun == self._ended else begun
            if ran:
                self._due += self._cost.round_s([row.drafted for row in ran], sum(row.prefilled for row in ran))
            waited_s = self._wait()
        self._ended = self._clock()
        return replace(result, verify_s=result.verify_s + waited_s) if waited_s else result, self._ended

    def _wait(self) -> float:
        """Seconds until the round is due."""
        begun = self._clock()
        while (left_s := self._due - self._clock()) > 0:
            self._sleep(left_s)
        return self._clock() - begun if begun < self._due else 0.0
