"""How output tokens are drawn and drafts verified. All requests take the same path; batches are not known here.

The draw at output position i inverts the distribution's cumulative sum, in the order of token ids, at a uniform number
that depends on (seed, i) alone. So a text depends on neither drafter, draft length, batch, preemption nor worker. The
order of ids is chosen for its stability: tiny differences of logits between batch shapes move each border between two
tokens a little, whereas in an order by probability they could swap whole tokens.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from worker_service.engine.types import Logprob, Sampling

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1): splitmix64 in counter mode, of which 53 bits are kept.

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


def verify(logits: torch.Tensor, drafts: Sequence[int], sampling: Sampling, start: int) -> list[int]:
    """The drafts that equal what the target draws, and then one token of the target's own.

    `logits`: float32 [len(drafts) + 1, vocabulary], of the output positions from `start` on. Drawing ends at the first
    difference from the drafts, and before logits that are no distribution: so there may be no token at all.
    """
    best = _argmax(logits) if sampling.temperature == 0 else []
    tokens: list[int] = []
    for j, row in enumerate(logits):
        token = best[j] if best else draw(row, sampling, start + j)
        if token is None:
            break
        tokens.append(token)
        if j < len(drafts) and token != drafts[j]:
            break
    return tokens


def _argmax(logits: torch.Tensor) -> list[int | None]:
    """The likeliest token of each row [n, vocabulary]; None where its logit is not finite.

    On a CPU numpy takes a tenth of the time that torch takes, and no other thread.
    """
    best = torch.as_tensor((logits.numpy() if logits.device.type == "cpu" else logits).argmax(-1))
    finite = logits.gather(-1, best[:, None])[:, 0].isfinite()
    return [token if good else None for token, good in zip(best.tolist(), finite.tolist(), strict=True)]


def logprobs(raw: torch.Tensor, tokens: Sequence[int], alternatives: int) -> tuple[Logprob, ...]:
    """Log-probabilities of `tokens`, drawn from the first rows of `raw` [n, vocabulary], and of the likeliest."""
    raw = raw[: len(tokens)]
    own = raw.gather(-1, torch.tensor(tokens, dtype=torch.long, device=raw.device)[:, None])[:, 0].tolist()
    best = raw.topk(min(alternatives, raw.shape[-1]))
    top = (tuple(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return tuple(map(Logprob, own, top))
