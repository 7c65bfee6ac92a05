"""What steps cost, learned while serving: every step corrects what warm-up measured. No clock lives here, and no
decision.

A step takes verify_s + verify_slope_s * (batch - 1) + verify_token_s * drafted + prefill_token_s * prefilled, and
beside that draft_s for each position drafted. So there are two linear models, fitted by least squares that forget old
steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace

from worker_service.engine.pass_costs import PassCosts
from worker_service.engine.types import CostProfile, Elsewhere, StepResult

FADING = 0.99  # of what a step has taught, with each further step
LEANING = 0.01  # weight of what was measured first, in steps: it decides where steps do not tell coefficients apart
ROBUSTNESS = 2.0  # times the usual error: a step that is further off counts less
LEAST_ERROR = 0.02  # that counts as usual, as a share of what was expected
TELL_STEPS = 32  # others are told at most once in so many steps
TELL_CHANGE = 0.1  # and only if a coefficient has changed by this share since they were told
_LEAST_S = 1e-6


class CostModel:
    """Not thread-safe but for reading `profile`."""

    def __init__(self, measured: CostProfile, passes: Mapping[int, float] | None = None) -> None:
        """`passes`: seconds of passes by their rows, as far as measured."""
        self.profile = self._told = measured
        least_s = 0.01 * measured.verify_s  # a coefficient that was measured as nothing may grow, too
        self._drafting = _LinearModel([measured.draft_s], least_s)
        self._verifying = _LinearModel(
            [measured.verify_s, measured.verify_slope_s, measured.verify_token_s, measured.prefill_token_s], least_s
        )
        self._wait_s = 0.0  # of a step, in the mean
        self._steps = 0
        self.passes = PassCosts(measured.verify_s, min(measured.verify_slope_s, measured.verify_token_s), passes)

    def observe(self, result: StepResult) -> CostProfile | None:
        """Learn from one step. Returns the profile if others should be told of it: see TELL_STEPS, TELL_CHANGE."""
        ran = [row for row in result.ran if row.tokens or row.drafted or row.prefilled]  # in the pass
        if not ran:
            return None
        prefilled, other_s = sum(row.prefilled for row in ran), result.verify_s + result.other_s
        drafted, draft_s = [row.drafted + row.branched for row in ran], result.draft_s
        self._wait_s += (1 - FADING) * (result.wait_s - self._wait_s)
        changed = self.observe_sums(drafted, prefilled, draft_s, other_s, result.elsewhere, result.positions)
        if not prefilled:
            self.passes.observe(len(drafted) + sum(drafted), other_s, draft_s, self._drafting.coefficients[0])
        return changed

    def observe_sums(
        self,
        drafted: Sequence[int],
        prefilled: int,
        draft_s: float,
        other_s: float,
        elsewhere: Elsewhere | None = None,
        positions: int = 0,
    ) -> CostProfile | None:
        """The same, told what each request drafted and what all prefilled. `other_s`: all but the drafter's seconds."""
        self._drafting.observe([positions], draft_s)
        self._verifying.observe([1, len(drafted) - 1, sum(drafted), prefilled], other_s)
        self._steps += 1
        told = self._told
        came_or_went = (elsewhere.chains if elsewhere else 0) != told.chains
        if self._steps % TELL_STEPS and not came_or_went:
            return None
        (draft_s,) = self._drafting.coefficients
        verify_s, slope_s, token_s, prefill_s = self._verifying.coefficients
        verify_s = max(verify_s, _LEAST_S)
        here = CostProfile(draft_s, verify_s, slope_s, prefill_s, token_s, told.offload_block_s)
        self.profile = replace(here, **elsewhere._asdict(), wait_s=self._wait_s) if elsewhere else here
        pairs = zip(astuple(self.profile), astuple(told), strict=True)
        if not any(abs(now - before) > TELL_CHANGE * max(now, before) for now, before in pairs):
            return None
        self._told = self.profile
        return self.profile


class _LinearModel:
    """Coefficients >= 0 for y = sum of coefficient * x, from samples of relative error.

    Weighted least squares with exponential forgetting, and a ridge that holds the coefficients near their start.
    Huber's weights (Robust Estimation of a Location Parameter, 1964) tame the outliers of a busy machine. Solved by
    coordinate descent, one sweep for each sample.
    """

    def __init__(self, start: Sequence[float], least: float) -> None:
        """A coefficient's changes are counted in its `start`, or in `least` if that is more."""
        self._scales = [max(value, least, 1e-12) for value in start]
        self._start = [value / scale for value, scale in zip(start, self._scales, strict=True)]
        self._now = list(self._start)
        self._xx = [[0.0] * len(start) for _ in start]
        self._xy = [0.0] * len(start)
        self._error = 0.1  # the usual one, as a share of what was expected

    @property
    def coefficients(self) -> list[float]:
        return [value * scale for value, scale in zip(self._now, self._scales, strict=True)]

    def observe(self, xs: Sequence[float], y: float) -> None:
        scaled = [x * scale for x, scale in zip(xs, self._scales, strict=True)]
        if not any(scaled):
            return
        expected = max(sum(x * value for x, value in zip(scaled, self._now, strict=True)), 1e-9)
        error = abs(y / expected - 1)
        weight = min(1.0, ROBUSTNESS * self._error / error) if error else 1.0
        # One outlier hardly widens what is usual; a change that lasts does so within some steps.
        self._error = max(LEAST_ERROR, 0.9 * self._error + 0.1 * min(error, 3 * self._error))
        row = [x / expected for x in scaled]
        for i, x in enumerate(row):
            self._xy[i] = FADING * self._xy[i] + weight * x * y / expected
            self._xx[i] = [FADING * old + weight * x * other for old, other in zip(self._xx[i], row, strict=True)]
        self._sweep()

    def _sweep(self) -> None:
        for i, products in enumerate(self._xx):
            others = sum(p * value for p, value in zip(products, self._now, strict=True)) - products[i] * self._now[i]
            best = (self._xy[i] - others + LEANING * self._start[i]) / (products[i] + LEANING)
            self._now[i] = max(0.0, best)
