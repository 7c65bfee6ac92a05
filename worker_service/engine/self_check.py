"""Whether the engine computes with a model what the model computes by itself: checked once before it serves.

The engine replaces the model's attention, keeps KV in blocks, and computes a text in several passes. A model that needs
more than that (a state that goes from token to token, a mask of its own) is found out here, before it answers anybody.
"""

from typing import Any

import torch

from worker_service.engine.engine import Engine
from worker_service.engine.kv import KV
from worker_service.engine.target import InputSequence

_TOKENS, _FIRST = 24, 13  # of the text, and of its first pass
# Of the logits' size. Rounding to bfloat16 makes differences of some hundredths, another form of attention of a half.
_TOLERANCE = 0.1


class MismatchError(Exception):
    """The engine computes something else than the model."""


@torch.inference_mode()
def own_logits(model: Any) -> torch.Tensor:
    """float32 [tokens, vocabulary] of a short text, as computed by a `model` that no engine has taken over yet."""
    logits: torch.Tensor = model(torch.tensor([_text(model.config.vocab_size)], device=model.device)).logits[0]
    return logits.float()


@torch.inference_mode()
def check(engine: Engine, expected: torch.Tensor) -> None:
    """`expected`: own_logits of its model. Raises MismatchError, and what a forward pass raises."""
    found = _logits_in_two_passes(engine, _text(engine.vocab_size))
    centred = expected - expected.mean(-1, keepdim=True)
    difference = float((found - found.mean(-1, keepdim=True) - centred).norm() / centred.norm())
    if not difference <= _TOLERANCE:  # a NaN is a mismatch, too
        raise MismatchError(f"logits in blocks and passes differ from its own by {difference:.0%}")


def _logits_in_two_passes(engine: Engine, text: list[int]) -> torch.Tensor:
    kv, parts = KV(engine.pool), []
    for part in (text[:_FIRST], text[_FIRST:]):
        start = kv.length
        kv.extend(len(part))
        parts.append(engine.target.forward([InputSequence(kv, start, part, 0)])[0].clone())
    kv.release()
    return torch.cat(parts)


def _text(vocab_size: int) -> list[int]:
    return [(7 + 31 * i * i) % vocab_size for i in range(_TOKENS)]
