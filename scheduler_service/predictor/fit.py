"""Fits a model to a window of finished requests: the only place that knows scikit-learn. Pure, and the same each time.

It is loaded when it is first needed: the library takes a second to import.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_service.predictor.model import HEADS, SURPRISES, Model
from scheduler_service.predictor.window import COLUMNS, Window

LEAST_ERROR = 0.05  # of ln(tokens), so that a perfect guess has a logarithm
DRAFTS = 32  # with so many a request's own acceptance is as sure as requests are alike


def fit(window: Window) -> Model:
    """Bayesian ridge regression of ln(tokens), then of the size of its errors, then of acceptance. How far to shrink is
    found by the evidence, so that features which tell nothing end at weights of 0. Raises ValueError if it is empty."""
    from threadpoolctl import threadpool_limits

    tokens, drafted, accepted = window.counts.T.astype(np.float64)
    if not len(tokens):
        raise ValueError("window: nothing to learn from")
    used = np.flatnonzero(window.rows.any(axis=0))
    rows = window.rows[:, used].astype(np.float64)
    weights, offsets = np.zeros((HEADS, COLUMNS)), np.zeros(HEADS)
    with threadpool_limits(1):  # the service needs the other cores; and sums come out the same
        weights[0, used], offsets[0], errors = _ridge(rows, np.log(tokens))
        sizes = np.log(np.abs(errors) + LEAST_ERROR)
        weights[1, used], offsets[1], size_errors = _ridge(rows, sizes)
        if (tried := drafted > 0).any():
            shares, sure = accepted[tried] / drafted[tried], drafted[tried] / (drafted[tried] + DRAFTS)
            weights[2, used], offsets[2], share_errors = _ridge(rows[tried], shares, sure)
        else:
            shares = share_errors = sure = np.zeros(0)
    scales = np.exp(sizes - size_errors)
    surprises = errors / scales
    tells = np.array([_tells(np.log(tokens), errors, scales), _tells(shares, share_errors, 1 / np.sqrt(sure))])
    return Model(weights, offsets, surprises[-SURPRISES:], tells, len(tokens), window.finished)


def _tells(targets: NDArray[np.float64], errors: NDArray[np.float64], scales: NDArray[np.float64]) -> bool:
    """Whether errors of these scales, left out one at a time, are likelier than those of the plain mean: by more than
    three standard errors of the difference. Where features tell nothing, all requests had better be believed alike:
    differences that mean nothing cost latency."""
    n = len(targets)
    if n < 3 or not np.ptp(targets):
        return False
    plain = (targets - targets.mean()) * n / (n - 1)
    gain = _likelihood(errors, scales) - _likelihood(plain, np.ones(n))
    return bool(gain.mean() > 3 * gain.std() / np.sqrt(n))


def _likelihood(errors: NDArray[np.float64], scales: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logarithm of the normal density, up to a constant, with the scales calibrated; one outlier is not all."""
    z = errors / scales
    size = np.sqrt(np.mean(z * z))
    return np.asarray(-np.log(scales * size) - np.clip(z / size, -4, 4) ** 2 / 2)


def _ridge(
    rows: NDArray[np.float64], targets: NDArray[np.float64], sure: NDArray[np.float64] | None = None
) -> tuple[NDArray[np.float64], float, NDArray[np.float64]]:
    """Weights, offset, and for each example the error of a fit without it, which for a ridge has a closed form."""
    from sklearn.linear_model import BayesianRidge

    if rows.shape[1] == 0 or len(rows) < 3:
        mean = float(np.average(targets, weights=sure))
        return np.zeros(rows.shape[1]), mean, targets - mean
    ridge: Any = BayesianRidge().fit(rows, targets, sample_weight=sure)
    centred = rows - np.average(rows, axis=0, weights=sure)
    share = np.ones(len(rows)) if sure is None else sure
    leverage = share * (ridge.alpha_ * ((centred @ ridge.sigma_) * centred).sum(axis=1) + 1 / share.sum())
    errors = (targets - ridge.predict(rows)) / np.maximum(0.05, 1 - leverage)
    return ridge.coef_, float(ridge.intercept_), errors
