"""Whether the engine computes with a model what the model computes by itself: checked once before it serves.

Attention is replaced, KV lies in blocks, a text comes in several passes. An architecture that needs more than that (a
state from token to token, a mask of its own) is found out here, and not by whoever reads its answers.
"""

from typing import Any

import torch

from worker_service.engine.engine import Engine

_TOKENS, _FIRST = 24, 13
_TOLERANCE = 0.1  # of the logits' size: rounding to bfloat16 makes some hundredths, attention of another form a half


class MismatchError(Exception):
    """The engine computes something else than the model."""


@torch.inference_mode()
def own_logits(model: Any) -> torch.Tensor:
    """Of a short text [n, vocabulary]. For a model that no engine has taken over yet."""
    logits: torch.Tensor = model(torch.tensor([_text(model.config.vocab_size)], device=model.device)).logits[0]
    return logits.float()


@torch.inference_mode()
def check(engine: Engine, expected: torch.Tensor) -> None:
    """`expected`: own_logits of its model. Raises MismatchError, and what a forward pass raises."""
    found = engine.logits_in_two_passes(_text(engine.vocab_size), _FIRST)
    centred = expected - expected.mean(-1, keepdim=True)
    difference = float((found - found.mean(-1, keepdim=True) - centred).norm() / centred.norm())
    if not difference <= _TOLERANCE:  # a NaN is a mismatch, too
        raise MismatchError(f"logits in blocks and passes differ from its own by {difference:.0%}")


def _text(vocab_size: int) -> list[int]:
    return [(7 + 31 * i * i) % vocab_size for i in range(_TOKENS)]
