"""Fits a model to a window of finished requests: the only place that knows scikit-learn. Pure, and the same each time.

It is loaded when it is first needed: the library takes a second to import.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_service.predictor.model import HEADS, SURPRISES, Model
from scheduler_service.predictor.window import COLUMNS, Window

FOLDS = 5
SHRINKAGES = (2.0, 10.0, 100.0)  # of the location's ridge, in squared weights; the folds choose
CALM = (10.0,)  # for the other two, which have less to say
LEAST_ERROR = 0.05  # of ln(tokens), so that a perfect guess has a logarithm
DENSE = 256  # up to so many columns, as simulations have, are solved outright; more by conjugate gradients
DRAFTS = 32  # with so many a request's own acceptance is as sure as requests are alike

Floats = NDArray[np.float64]


def fit(window: Window) -> Model:
    """Ridge regression of ln(tokens), then of the size of its errors, and of acceptance. Every error is that of a fit
    without the example. Raises ValueError if the window is empty."""
    from scipy.sparse import csr_array
    from sklearn import config_context
    from threadpoolctl import threadpool_limits

    tokens, drafted, accepted = window.counts.T.astype(np.float64)
    if not len(tokens):
        raise ValueError("window: nothing to learn from")
    used, columns = np.unique(window.columns, return_inverse=True)
    shape = len(tokens), max(1, len(used))
    rows: Any = csr_array((window.values.astype(np.float64), columns, window.starts), shape=shape)
    if len(used) <= DENSE:
        rows = rows.toarray()
    weights, offsets = np.zeros((HEADS, COLUMNS), np.float32), np.zeros(HEADS)
    # One thread: the service needs the other cores, and sums come out the same. The arguments are known to be right.
    with threadpool_limits(1), config_context(assume_finite=True, skip_parameter_validation=True):
        weights[0, used], offsets[0], errors = _ridge(rows, np.log(tokens), SHRINKAGES)
        sizes = np.log(np.abs(errors) + LEAST_ERROR)
        weights[1, used], offsets[1], size_errors = _ridge(rows, sizes, CALM)
        tried = drafted > 0
        shares, sure = accepted[tried] / drafted[tried], drafted[tried] / (drafted[tried] + DRAFTS)
        weights[2, used], offsets[2], share_errors = _ridge(rows[np.flatnonzero(tried)], shares, CALM, sure)
    scales = np.exp(sizes - size_errors)
    tells = [_tells(np.log(tokens), errors, scales), _tells(shares, share_errors, 1 / np.sqrt(sure))]
    return Model(weights, offsets, (errors / scales)[-SURPRISES:], np.array(tells), len(tokens), window.finished)


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
    ridge = _fitted(rows, targets, shrinkage, sure)
    return ridge.coef_, float(ridge.intercept_), errors


def _left_out(rows: Any, targets: Floats, shrinkage: float, sure: Floats) -> Floats:
    folds, errors = np.arange(len(targets)) % FOLDS, np.zeros(len(targets))
    for fold in range(FOLDS):
        out, rest = np.flatnonzero(folds == fold), np.flatnonzero(folds != fold)
        errors[out] = targets[out] - _fitted(rows[rest], targets[rest], shrinkage, sure[rest]).predict(rows[out])
    return errors


def _fitted(rows: Any, targets: Floats, shrinkage: float, sure: Floats) -> Any:
    from sklearn.linear_model import Ridge

    return Ridge(shrinkage, tol=1e-4).fit(rows, targets, sample_weight=sure)


def _tells(targets: Floats, errors: Floats, scales: Floats) -> bool:
    """Whether errors of these scales, left out fold by fold, are likelier than those of the plain mean: by more than
    three standard errors of the difference. Where features tell nothing, all requests had better be believed alike:
    differences that mean nothing cost latency."""
    n = len(targets)
    if n < 2 * FOLDS or not np.ptp(targets):
        return False
    plain = (targets - targets.mean()) * n / (n - 1)
    gain = _likelihood(errors, scales) - _likelihood(plain, np.ones(n))
    return bool(gain.mean() > 3 * gain.std() / np.sqrt(n))


def _likelihood(errors: Floats, scales: Floats) -> Floats:
    """Logarithm of the normal density, up to a constant, with the scales calibrated; one outlier is not all."""
    z = errors / scales
    size = max(1e-9, float(np.sqrt(np.mean(z * z))))
    return np.asarray(-np.log(scales * size) - np.clip(z / size, -4, 4) ** 2 / 2)
