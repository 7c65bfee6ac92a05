"""Fits a model to a window of finished requests: the only place that solves regressions. Pure, and the same each time.

scipy is loaded when it is first needed, for its import takes a third of a second.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_service.predictor.model import HEADS, SURPRISES, TURN, Model
from scheduler_service.predictor.window import COLUMNS, Window

FOLDS = 5
SHRINKAGES = (2.0, 10.0, 100.0)  # of the location's ridge, in squared weights; the folds choose
CALM = (10.0,)  # for the other two, which have less to say
LEAST_ERROR = 0.05  # of ln(tokens), so that a perfect guess has a logarithm
STEPS, ALIKE_STEPS = 5, 200  # of expectation-maximisation; the cheap one comes first, and is where the other begins
GRADIENT_STEPS = 400  # of conjugate gradients at most; 4,096 requests took 41
DENSE = 256  # up to so many columns, as simulations have, are solved outright; more by conjugate gradients
DRAFTS = 32  # with so many a request's own acceptance is as sure as requests are alike

Floats = NDArray[np.float64]


def fit(window: Window) -> Model:
    """Ridge regression of ln(tokens), then of the size of its errors, and of acceptance. Every error is that of a fit
    without the example. Of answers that their bounds have cut, what they would have come to is estimated. Raises
    ValueError if the window is empty."""
    from scipy.sparse import csr_array
    from threadpoolctl import threadpool_limits

    tokens, drafted, accepted, was_cut = window.counts.T.astype(np.float64)
    if not len(tokens):
        raise ValueError("window: nothing to learn from")
    used, columns = np.unique(window.columns, return_inverse=True)
    shape = len(tokens), max(1, len(used))
    rows: Any = csr_array((window.values.astype(np.float64), columns, window.starts), shape=shape)
    if len(used) <= DENSE:
        rows = rows.toarray()
    weights, offsets = np.zeros((HEADS, COLUMNS), np.float32), np.zeros(HEADS)
    with threadpool_limits(1):  # the service needs the other cores, and sums come out the same
        seen, cut = np.log(tokens), was_cut > 0
        alike, alike_spread = _uncut(seen, cut, seen, float(seen.std()), np.mean, ALIKE_STEPS)
        lengths, spread = _uncut(seen, cut, alike, alike_spread, partial(_held_out, rows), STEPS)
        weights[0, used], offsets[0], errors = _ridge(rows, lengths, SHRINKAGES)
        expected = lengths - errors
        errors[cut] = _drawn_beyond(seen[cut] - expected[cut], spread)
        sizes = np.log(np.abs(errors) + LEAST_ERROR)
        weights[1, used], offsets[1], size_errors = _ridge(rows, sizes, CALM)
        tried = drafted > 0
        shares, sure = accepted[tried] / drafted[tried], drafted[tried] / (drafted[tried] + DRAFTS)
        weights[2, used], offsets[2], share_errors = _ridge(rows[np.flatnonzero(tried)], shares, CALM, sure)
    scales, share_scales = np.exp(sizes - size_errors), 1 / np.sqrt(sure)
    plain = shares - (np.average(shares, weights=sure) if len(shares) else 0.0)
    tells = [
        # Of lengths that hardly any answer came to, nothing can be told.
        bool(np.sum(~cut) >= 2 * FOLDS)
        and _tells(
            _likelihood(seen - expected, scales * _size(errors / scales), cut),
            _likelihood(seen - alike.mean(), np.full(len(seen), alike_spread), cut),
        ),
        _tells(
            _likelihood(share_errors, share_scales * _size(share_errors / share_scales)),
            _likelihood(plain, share_scales * _size(plain / share_scales)),
        ),
    ]
    return Model(weights, offsets, (errors / scales)[-SURPRISES:], np.array(tells), len(tokens), window.finished)


def _uncut(
    seen: Floats, cut: NDArray[np.bool_], lengths: Floats, spread: float, fit: Callable[[Floats], Any], steps: int
) -> tuple[Floats, float]:
    """What is `seen`, but of what was cut its mean had it not been; and the spread around what is expected by `fit`.
    `lengths` and `spread` are where it begins.

    Normal regression with censored observations (Tobin, "Estimation of relationships for limited dependent variables",
    Econometrica 26, 1958), by expectation-maximisation.
    """
    from scipy.special import log_ndtr

    spread = max(LEAST_ERROR, spread)
    if cut.any() and len(seen) >= 2 * FOLDS:
        for _ in range(steps):
            expected = np.broadcast_to(fit(lengths), seen.shape)
            z = (seen - expected)[cut] / spread
            hazard = np.exp(-z * z / 2 - log_ndtr(-z)) / np.sqrt(2 * np.pi)
            lengths = seen.copy()
            lengths[cut] = expected[cut] + spread * hazard
            squares = (lengths - expected) ** 2
            squares[cut] += spread**2 * np.maximum(0.0, 1 + z * hazard - hazard**2)
            spread = max(LEAST_ERROR, float(np.sqrt(squares.mean())))
    return lengths, spread


def _held_out(rows: Any, lengths: Floats) -> Floats:
    """What is expected of each by a fit without it."""
    return lengths - _left_out(rows, lengths, SHRINKAGES[1], np.ones(len(lengths)))


def _drawn_beyond(errors: Floats, spread: float) -> Floats:
    """Larger ones, drawn from a normal distribution with that spread; the same each time."""
    from scipy.special import ndtr, ndtri

    shares = (np.arange(1, len(errors) + 1) * TURN) % 1
    return np.asarray(np.maximum(errors, -spread * ndtri(shares * ndtr(-np.minimum(errors / spread, 8.0)))))


def _ridge(
    rows: Any, targets: Floats, shrinkages: tuple[float, ...], sure: Floats | None = None
) -> tuple[Floats, float, Floats]:
    """Weights, offset, and for each example the error of a fit without its fold; the shrinkage that makes those least.
    With hardly any examples: their mean."""
    n, used = rows.shape
    sure = np.ones(n) if sure is None else sure
    if n < 2 * FOLDS:
        mean = float(np.average(targets, weights=sure)) if n else 0.0
        return np.zeros(used), mean, targets - mean
    tried = [(shrinkage, _left_out(rows, targets, shrinkage, sure)) for shrinkage in shrinkages]
    shrinkage, errors = min(tried, key=lambda one: float(np.average(one[1] ** 2, weights=sure)))
    return *_fitted(rows, targets, shrinkage, sure), errors


def _left_out(rows: Any, targets: Floats, shrinkage: float, sure: Floats) -> Floats:
    folds, errors = np.arange(len(targets)) % FOLDS, np.zeros(len(targets))
    for fold in range(FOLDS):
        out, rest = np.flatnonzero(folds == fold), np.flatnonzero(folds != fold)
        weights, offset = _fitted(rows[rest], targets[rest], shrinkage, sure[rest])
        errors[out] = targets[out] - rows[out] @ weights - offset
    return errors


def _fitted(rows: Any, targets: Floats, shrinkage: float, sure: Floats) -> tuple[Floats, float]:
    """Weights and offset of a ridge regression, of which the offset is not shrunk. `sure`: how much examples count."""
    mean, middle = sure @ rows / sure.sum(), np.average(targets, weights=sure)
    above = sure * (targets - middle)
    if isinstance(rows, np.ndarray):
        centred = rows - mean
        squares = (centred.T * sure) @ centred + shrinkage * np.identity(len(mean))
        weights = np.linalg.solve(squares, centred.T @ above)
    else:
        weights = _solved(rows, mean, shrinkage, sure, rows.T @ above - mean * above.sum())
    return weights, float(middle - mean @ weights)


def _solved(rows: Any, mean: Floats, shrinkage: float, sure: Floats, wanted: Floats) -> Floats:
    """The weights by which the squares of sparse rows, less their `mean`, make what is `wanted`: they stay sparse."""
    from scipy.sparse.linalg import LinearOperator, cg

    def squares(weights: Floats) -> Floats:
        told = sure * (rows @ weights - mean @ weights)
        return np.asarray(rows.T @ told - mean * told.sum() + shrinkage * weights)

    weights, _ = cg(LinearOperator((len(mean), len(mean)), squares), wanted, rtol=1e-4, maxiter=GRADIENT_STEPS)
    return np.asarray(weights)


def _tells(ours: Floats, alike: Floats) -> bool:
    """Whether a model whose examples, left out fold by fold, have these likelihoods is better than believing all alike,
    by more than three standard errors of the difference. Where features tell nothing, differences that mean nothing
    would cost latency."""
    gain = ours - alike
    return len(gain) >= 2 * FOLDS and bool(gain.mean() > 3 * gain.std() / np.sqrt(len(gain)))


def _likelihood(errors: Floats, scales: Floats, cut: NDArray[np.bool_] | None = None) -> Floats:
    """Logarithm of the normal density at what was seen; of what was `cut`, of the probability of more. One outlier is
    not all."""
    from scipy.special import log_ndtr

    z = np.clip(errors / (scales := np.maximum(scales, LEAST_ERROR)), -4, 4)
    density = -np.log(scales) - (z * z + np.log(2 * np.pi)) / 2
    return np.asarray(density if cut is None else np.where(cut, log_ndtr(-z), density))


def _size(errors: Floats) -> float:
    return float(np.sqrt(np.mean(errors * errors))) if len(errors) else 1.0
