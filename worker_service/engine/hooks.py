"""Hooks that change logits before a token is drawn: masks, bias, penalties. No token is drawn here."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from worker_service.engine.counted import Counted
from worker_service.engine.types import Limits, Sampling
from worker_service.engine.upload import sent


@dataclass(frozen=True, slots=True)
class LogitsContext:
    """Row j of the logits follows `tokens` and `first + j` of `drafts`; output token `start + first + j` is drawn from
    it."""

    tokens: Sequence[int]  # prompt and output
    drafts: Sequence[int]
    start: int
    sampling: Sampling
    limits: Limits
    eos_ids: frozenset[int]
    # What the structure of the output allows: uint8 [n, bytes], a bit for each token, the least significant ones first.
    allowed: torch.Tensor | None = None
    few: Sequence[torch.Tensor | None] = ()  # of each row the tokens that it allows, where they are few and known
    counted: Counted | None = None  # of `tokens`, if somebody keeps it
    first: int = 0

    def row(self, j: int) -> "LogitsContext":
        """Of row j alone."""
        allowed = None if self.allowed is None else self.allowed[j : j + 1]
        return replace(self, first=j, allowed=allowed, few=self.few[j : j + 1])

    def after(self, drafts: Sequence[int]) -> "LogitsContext":
        """Of rows after one of these drafts, after two, and so on. Without a structure."""
        tokens = [*self.tokens, drafts[0]]
        return replace(self, tokens=tokens, drafts=drafts[1:], start=self.start + 1, counted=None)


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
    return _cut_with_numpy(logits, context.allowed)


def _cut_with_numpy(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """In place, row by row: what is written then is in the cache already, and no new memory is asked for. It takes a
    twentieth of torch's time, and no other thread."""
    ceiling = _scratch(allowed.shape[1])
    for row, bits in zip(logits.numpy(), allowed.numpy(), strict=True):
        np.take(_CEILINGS, bits, axis=0, out=ceiling, mode="clip")  # with another mode numpy would make a copy first
        np.fmin(row, ceiling.reshape(-1)[: len(row)], out=row)
    return logits


def is_allowed(allowed: torch.Tensor, token: int) -> bool:
    """By a mask, uint8 [bytes]."""
    return bool(int(allowed[token >> 3]) >> (token & 7) & 1)


def _scratch(width: int) -> np.ndarray[Any, Any]:
    """[width, 8] of this thread's."""
    if getattr(_kept, "width", None) != width:
        _kept.width, _kept.ceiling = width, np.empty((width, 8), np.float32)
    return _kept.ceiling  # type: ignore[no-any-return]


def _cut_with_torch(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    table = sent(torch.from_numpy(_CEILINGS), logits.device)
    ceiling = table[sent(allowed, logits.device).long()].flatten(1)[:, : logits.shape[1]]
    return torch.fmin(logits, ceiling, out=logits)


def bias(logits: torch.Tensor, context: LogitsContext) -> torch.Tensor:
    """Add `logit_bias`."""
    if context.sampling.logit_bias:
        tokens, values = zip(*context.sampling.logit_bias, strict=True)
        ids = sent(torch.tensor(tokens, dtype=torch.long), logits.device)
        logits[:, ids] += sent(torch.tensor(values, dtype=logits.dtype), logits.device)
    return logits


def penalise(logits: torch.Tensor, context: LogitsContext) -> torch.Tensor:
    """Repetition penalty (Keskar et al., CTRL, 2019, arXiv 1909.05858), then OpenAI's presence and frequency penalties.

    For row j the drafts before it count as emitted: the row is used only if they are.
    """
    own = context.sampling
    if not _penalises(own):
        return logits
    counted = context.counted or Counted(len(context.tokens) - context.start)
    counts = counted.rows(context.tokens, context.drafts, context.first, len(logits))
    numbers = sent(torch.from_numpy(counts), logits.device)
    ids, prompt, output = numbers[0].long(), numbers[1], numbers[2:]
    values = logits[:, ids]
    repeated = torch.where(values > 0, values / own.repetition_penalty, values * own.repetition_penalty)
    values = torch.where(prompt + output > 0, repeated, values)
    logits[:, ids] = values - (own.frequency_penalty * output + own.presence_penalty * (output > 0))
    return logits


def _penalises(own: Sampling) -> bool:
    return not (own.repetition_penalty == 1 and own.presence_penalty == own.frequency_penalty == 0)


def suppress_eos(logits: torch.Tensor, context: LogitsContext) -> torch.Tensor:
    """Before `min_tokens` exist no end-of-sequence id can be drawn, unless they are ignored (`ignore_eos`)."""
    rows = min(context.limits.min_tokens - context.start - context.first, len(logits))
    if rows > 0 and not context.limits.ignore_eos:
        ids = sent(torch.tensor(list(context.eos_ids), dtype=torch.long), logits.device)
        logits[:rows].index_fill_(1, ids, -math.inf)
    return logits


# The structure comes first: what it forbids no bias brings back, and temperature, top-k and top-p, which come after all
# hooks, choose among what it allows. The others are in vLLM's order.
HOOKS: tuple[LogitsHook, ...] = (follow_structure, suppress_eos, bias, penalise)


def untouched(context: LogitsContext) -> bool:
    """Whether none of HOOKS has anything to do."""
    return context.allowed is None and only_masked(context)


def only_masked(context: LogitsContext) -> bool:
    """Whether none of HOOKS but `follow_structure` has anything to do."""
    waits = context.limits.min_tokens > context.start + context.first and not context.limits.ignore_eos
    return not (waits or context.sampling.logit_bias or _penalises(context.sampling))
