"""How an output token is drawn. One path for all: no drafts, acceptance or batches are known here.

The draw at output position i inverts the distribution's cumulative sum, in order of token ids, at a uniform that
depends on (seed, i) alone. So a text depends on neither drafter, draft length, batch, preemption nor worker. The order
of ids is chosen for its stability: tiny differences of logits between batch shapes move each border a little, whereas
in an order by probability they could swap whole tokens.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from worker_service.engine.types import Sampling

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_NUCLEUS_CANDIDATES = 1024  # sorting these is enough for top-p nearly always; the whole vocabulary costs 20 times that


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed: int, start: int, n: int) -> NDArray[np.float64]:
    """float64 [n] in [0, 1) for output positions start .. start + n - 1: splitmix64 in counter mode, 53 bits kept.

    The seed is mixed first, so that neighbouring seeds do not read the same stream one position apart.
    """
    state = _mix(np.array([seed], dtype=np.uint64) + _GAMMA)
    counter = np.arange(start + 1, start + n + 1, dtype=np.uint64)
    result: NDArray[np.float64] = (_mix(state + counter * _GAMMA) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """float64 [n, vocabulary] that sums to 1: temperature (above 0), then top-k, then top-p; ties at a border stay."""
    vocab = logits.shape[-1]
    logits = logits.double()
    scaled = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    if 0 < sampling.top_k < vocab:
        least = scaled.topk(sampling.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -math.inf)
    p = scaled.softmax(-1)
    if sampling.top_p < 1:
        ordered = p.topk(min(vocab, _NUCLEUS_CANDIDATES)).values
        if bool((ordered.sum(-1) < sampling.top_p).any()):
            ordered = p.sort(descending=True).values
        likelier = ordered.cumsum(-1) - ordered  # the mass before each
        least = ordered.masked_fill(likelier >= sampling.top_p, math.inf).amin(-1, keepdim=True)
        p = p.masked_fill(p < least, 0.0)
    return p / p.sum(-1, keepdim=True)


def draw(logits: torch.Tensor, sampling: Sampling, start: int) -> torch.Tensor:
    """Token ids [n] for float32 logits [n, vocabulary] of the output positions from `start` on."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    cumulative = probabilities(logits, sampling).cumsum(-1)
    u = torch.from_numpy(uniforms(sampling.seed, start, len(logits))).to(logits.device)[:, None]
    total = cumulative[:, -1:]
    # Strictly below the total, whatever rounding does: else a token of probability zero could be drawn.
    point = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, point, right=True)[:, 0]
