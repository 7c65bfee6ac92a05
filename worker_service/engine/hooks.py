"""Hooks that change logits before a token is drawn: masks, bias, penalties. What is drawn is not decided here."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from worker_service.engine.types import Limits


@dataclass(frozen=True, slots=True)
class LogitsContext:
    """Row j of the logits follows `tokens` and the first j of `drafts`; it draws output position `start + j`."""

    tokens: Sequence[int]  # prompt and output
    drafts: Sequence[int]
    start: int
    limits: Limits
    eos_ids: frozenset[int]


# Maps float32 logits [n, vocabulary] to logits of the same shape. It may write in place.
LogitsHook = Callable[[torch.Tensor, LogitsContext], torch.Tensor]


def suppress_eos(logits: torch.Tensor, context: LogitsContext) -> torch.Tensor:
    """Until `min_tokens` exist no end-of-sequence id can be drawn; with `ignore_eos` they are tokens like any other."""
    rows = min(context.limits.min_tokens - context.start, len(logits))
    if rows > 0 and not context.limits.ignore_eos:
        logits[:rows, list(context.eos_ids)] = -math.inf
    return logits
