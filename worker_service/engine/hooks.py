"""Hooks that change logits before a token is drawn: masks, bias, penalties. No token is drawn here."""

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from worker_service.engine import native
from worker_service.engine.types import Limits, Sampling


@dataclass(frozen=True, slots=True)
class LogitsContext:
    """Row j of the logits follows `tokens` and j of `drafts`: output token `start + j` is drawn from it."""

    tokens: Sequence[int]  # prompt and output
    drafts: Sequence[int]
    start: int
    sampling: Sampling
    limits: Limits
    eos_ids: frozenset[int]
    # What the structure of the output allows: uint8 [n, bytes], a bit for each token, the least significant ones first.
    allowed: torch.Tensor | None = None


# Maps float32 logits [n, vocabulary] to logits of the same shape. It may write in place.
LogitsHook = Callable[[torch.Tensor, LogitsContext], torch.Tensor]


# What logits are cut down to, for each value of eight tokens' bits: [256, 8].
_CEILINGS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], 1, bitorder="little"), math.inf, -math.inf)
_CEILINGS = _CEILINGS.astype(np.float32)
_kept = threading.local()


def follow_structure(logits: torch.Tensor, context: LogitsContext) -> torch.Tensor:
    """Only tokens that the structure allows can be drawn. Their probabilities keep their proportions."""
    if context.allowed is None:
        return logits
    if logits.device.type != "cpu":
        return _cut_with_torch(logits, context.allowed)
    if (kernel := _kernel()) is None:
        return _cut_with_numpy(logits, context.allowed)
    kernel(logits.data_ptr(), context.allowed.data_ptr(), *logits.shape, context.allowed.shape[1])
    return logits


@functools.cache
def _kernel() -> Callable[..., None] | None:
    if native.kernels() is None:
        return None
    return native.function("mask", torch.float32, *[ctypes.c_void_p] * 2, *[ctypes.c_int] * 3)


def _cut_with_numpy(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """In place, row by row: what is written then is in the cache already, and no new memory is asked for. It takes a
    twentieth of torch's time, and no other thread."""
    ceiling = _scratch(allowed.shape[1])
    for row, bits in zip(logits.numpy(), allowed.numpy(), strict=True):
        np.take(_CEILINGS, bits, axis=0, out=ceiling, mode="clip")  # with another mode numpy would make a copy first
        np.minimum(row, ceiling.reshape(-1)[: len(row)], out=row)
    return logits


def _scratch(width: int) -> np.ndarray[Any, Any]:
    """[width, 8] of this thread's."""
    if getattr(_kept, "width", None) != width:
        _kept.width, _kept.ceiling = width, np.empty((width, 8), np.float32)
    return _kept.ceiling  # type: ignore[no-any-return]


def _cut_with_torch(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    table = torch.from_numpy(_CEILINGS).to(logits.device)
    return logits.minimum(table[allowed.to(logits.device).long()].flatten(1)[:, : logits.shape[1]])


def bias(logits: torch.Tensor, context: LogitsContext) -> torch.Tensor:
    """Add `logit_bias`."""
    if context.sampling.logit_bias:
        tokens, values = zip(*context.sampling.logit_bias, strict=True)
        logits[:, list(tokens)] += torch.tensor(values, dtype=logits.dtype, device=logits.device)
    return logits


def penalise(logits: torch.Tensor, context: LogitsContext) -> torch.Tensor:
    """Repetition penalty (Keskar et al., CTRL, 2019, arXiv 1909.05858), then OpenAI's presence and frequency penalties.

    For row j the first j drafts count as emitted: the row is used only if they are.
    """
    own = context.sampling
    if own.repetition_penalty == 1 and own.presence_penalty == own.frequency_penalty == 0:
        return logits
    prompt_len = len(context.tokens) - context.start
    prompt, output = (
        torch.bincount(torch.tensor(part, dtype=torch.long), minlength=logits.shape[1]).to(logits.device)
        for part in (context.tokens[:prompt_len], context.tokens[prompt_len:])
    )
    for j, row in enumerate(logits):
        if j:
            output[context.drafts[j - 1]] += 1
        repeated = torch.where(row > 0, row / own.repetition_penalty, row * own.repetition_penalty)
        row.copy_(torch.where(prompt + output > 0, repeated, row))
        row -= own.frequency_penalty * output + own.presence_penalty * (output > 0)
    return logits


def suppress_eos(logits: torch.Tensor, context: LogitsContext) -> torch.Tensor:
    """Before `min_tokens` exist no end-of-sequence id can be drawn, unless they are ignored (`ignore_eos`)."""
    rows = min(context.limits.min_tokens - context.start, len(logits))
    if rows > 0 and not context.limits.ignore_eos:
        logits[:rows, list(context.eos_ids)] = -math.inf
    return logits


# The structure comes first: what it forbids no bias brings back, and temperature, top-k and top-p, which come after all
# hooks, choose among what it allows. The others are in vLLM's order.
HOOKS: tuple[LogitsHook, ...] = (follow_structure, suppress_eos, bias, penalise)
