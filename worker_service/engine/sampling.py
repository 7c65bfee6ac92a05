"""How output tokens are drawn from rows of logits: one alone, or many at once on a device. Requests are not known here.

The draw at output position i inverts the distribution's cumulative sum, in the order of token ids, at a uniform number
that depends on (seed, i) alone. So a text depends on neither drafter, draft length, batch, preemption nor worker. The
order of ids is chosen for its stability: tiny differences of logits between batch shapes move each border between two
tokens a little, whereas in an order by probability they could swap whole tokens.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from worker_service.engine.types import Logprob, Sampling
from worker_service.engine.upload import sent

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(x: Any) -> Any:
    """The finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def uniform(seed: Any, position: Any) -> Any:
    """A number in [0, 1): splitmix64 in counter mode, of which 53 bits are kept. Of two arrays of uint64 an array.

    The seed is mixed first, so that neighbouring seeds do not read the same stream one position apart.
    """
    return (_mix(_mix(seed + _GAMMA & _MASK) + (position + 1) * _GAMMA & _MASK) >> 11) * 2.0**-53


def weights(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Unnormalised probabilities [vocabulary]: temperature (above 0), then top-k, then top-p; ties at a border stay."""
    scaled = (logits - logits.max()) / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], -math.inf)
    weight = scaled.exp()
    if sampling.top_p < 1 and math.isfinite(total := float(weight.sum(dtype=torch.float64))):
        # All tokens below this weight together are less than the mass to be cut: no need to sort them. The largest
        # weight is 1, and must stay where all are equal and nothing is to be kept but one.
        negligible = min((1 - sampling.top_p) * total / len(weight), 1.0)
        ordered = np.sort(weight[weight >= negligible].cpu().numpy())[::-1]  # torch sorts a hundred times slower here
        mass = np.cumsum(ordered, dtype=np.float64)
        last = min(int(np.searchsorted(mass, sampling.top_p * total)), len(mass) - 1)
        weight = weight.masked_fill(weight < float(ordered[last]), 0.0)
    return weight


def draw(logits: torch.Tensor, sampling: Sampling, position: int) -> int | None:
    """The token of output position `position`, for float32 logits [vocabulary] and a temperature above 0.

    None: the logits are no distribution, for the largest is not finite.
    """
    cumulative = weights(logits, sampling).cumsum(0, dtype=torch.float64)
    total = float(cumulative[-1])
    if not math.isfinite(total):
        return None
    # Strictly below the total, whatever rounding does: else a token of probability zero could be drawn.
    point = min(uniform(sampling.seed, position) * total, math.nextafter(total, 0.0))
    return int(torch.searchsorted(cumulative, point, right=True))


def draw_rows(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> torch.Tensor:
    """As `draw`, of many rows [n, vocabulary] at once and without waiting for their device: int64 [n], -1 for None."""
    seeds, places = (np.array(x, np.uint64) for x in ([own.seed & _MASK for own in samplings], positions))
    most = [own.top_k if own.top_k < logits.shape[1] else 0 for own in samplings]
    columns = [own.temperature for own in samplings], most, [own.top_p for own in samplings], uniform(seeds, places)
    given = sent(torch.from_numpy(np.array(columns, np.float64)), logits.device)
    temperature, top_k, top_p, chance = given[..., None]
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.float()
    if max(most):
        border = scaled.topk(max(most)).values.gather(-1, top_k.long().sub(1).clamp(0))
        scaled = scaled.masked_fill((scaled < border) & (top_k > 0), -math.inf)
    weight = scaled.exp()
    if any(own.top_p < 1 for own in samplings):
        weight = weight.masked_fill((weight < _nucleus(weight, top_p)) & (top_p < 1), 0.0)
    cumulative = weight.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    point = torch.minimum(chance * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, point, right=True).masked_fill(~total.isfinite(), -1)[:, 0]


def _nucleus(weight: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The least weight [n, 1] that `top_p` [n, 1] keeps, as in `weights`."""
    total = weight.sum(-1, keepdim=True, dtype=torch.float64)
    negligible = ((1 - top_p) * total / weight.shape[1]).clamp(max=1.0).float()
    ordered = weight.sort(-1, descending=True).values
    last = torch.searchsorted(ordered.cumsum(-1, dtype=torch.float64), top_p * total)
    kept = (weight >= negligible).sum(-1, keepdim=True)
    return ordered.gather(-1, torch.minimum(last, kept - 1).clamp(0))


def agreed(tokens: Iterable[int | None], drafts: Sequence[int]) -> list[int]:
    """Of the tokens drawn after 0, 1, ... drafts those up to the first that differs from its draft; none from one on
    that is no token (None or -1)."""
    found: list[int] = []
    for j, token in enumerate(tokens):
        if token is None or token < 0:
            break
        found.append(token)
        if j < len(drafts) and token != drafts[j]:
            break
    return found


def argmax(logits: torch.Tensor) -> list[int | None]:
    """The likeliest token of each row [n, vocabulary] on a CPU; None where its logit is not finite.

    By numpy, which takes a tenth of the time that torch takes, and no other thread.
    """
    rows = logits.numpy()
    best = rows.argmax(-1).tolist()
    return [token if math.isfinite(row[token]) else None for row, token in zip(rows, best, strict=True)]


def argmax_rows(logits: torch.Tensor) -> torch.Tensor:
    """As `argmax`, on any device and without waiting for it: int64 [n], -1 for None."""
    best = logits.max(-1)
    return best.indices.masked_fill(~best.values.isfinite(), -1)


def logprobs(raw: torch.Tensor, tokens: Sequence[int], alternatives: int) -> tuple[Logprob, ...]:
    """Log-probabilities of `tokens`, drawn from the first rows of `raw` [n, vocabulary], and of the likeliest."""
    raw = raw[: len(tokens)]
    own = raw.gather(-1, torch.tensor(tokens, dtype=torch.long, device=raw.device)[:, None])[:, 0].tolist()
    best = raw.topk(min(alternatives, raw.shape[-1]))
    top = (tuple(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return tuple(map(Logprob, own, top))
