"""A worker that behaves like a device whose steps always take what a cost profile says. It is for comparisons alone: a
shared machine is now faster and now slower, and near saturation that outweighs what is compared."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter, sleep

from worker_service.engine.port import EnginePort
from worker_service.engine.types import CostProfile, Run, StepResult
from worker_service.engine.warm_up import Measured
from worker_service.runner import Runner


class Pace:
    """Waits at the end of each step until the imagined device would be done with it."""

    def __init__(
        self, cost: CostProfile, clock: Callable[[], float] = perf_counter, sleep: Callable[[float], None] = sleep
    ) -> None:
        self._cost, self._clock, self._sleep = cost, clock, sleep
        self._ended = self._due = 0.0

    def profile(self, measured: CostProfile) -> CostProfile:
        """What steps cost at this pace; offloading costs what was `measured`."""
        return replace(self._cost, offload_block_s=measured.offload_block_s)

    def hold(self, begun: float, result: StepResult) -> tuple[StepResult, float]:
        """Return when a step that began at `begun` is due to end, or at once if that is past.

        Returns the step's result, in which the wait is part of the forward pass, and the time at which it ended. A step
        that begins at that very time did not have to wait for a command. If the one before it was late, it makes up for
        that: it ends when both would have ended on the device.
        """
        ran, waited_s = result.ran, 0.0
        self._due = self._due if begun == self._ended else begun
        if ran:
            self._due += self._cost.step_s([row.drafted for row in ran], sum(row.prefilled for row in ran))
            self._due += self._cost.verify_token_s * sum(row.branched for row in ran)
        now = self._clock()
        if now < self._due:
            self._wait()
            waited_s = self._clock() - now
        self._ended = self._clock()
        return replace(result, verify_s=result.verify_s + waited_s), self._ended

    def _wait(self) -> None:
        while (remaining_s := self._due - self._clock()) > 0:
            self._sleep(remaining_s)


class PacedRunner(Runner):
    """The worker's runner, at a pace."""

    def __init__(self, engine: EnginePort, slots: int, threads: int, pace: Pace) -> None:
        super().__init__(engine, slots, threads)
        self._pace = pace

    def _measure(self) -> Measured:
        return Measured(self._pace.profile(super()._measure().profile), {})

    def _step(self, schedule: Sequence[Run], begun: float) -> tuple[StepResult, float]:
        result, _ = super()._step(schedule, begun)
        return self._pace.hold(begun, result)
