"""Whether the engine computes with a model what the model computes by itself: checked once before it serves.

The engine replaces the model's attention, keeps KV in blocks, and computes a text in several passes. A model that needs
more than that (a state that goes from token to token, a mask of its own) is found out here, before it answers anybody.
Where its attention has windows, the text is longer than all of them.
"""

import logging
from time import perf_counter
from typing import Any, NamedTuple

import torch

from worker_service.engine.engine import Engine
from worker_service.engine.kv import KV
from worker_service.engine.shape import layer_configs, text_config
from worker_service.engine.target import InputSequence, given_rows

_TOKENS, _LAST = 24, 11  # compared at the end of the text, and computed in the last pass
_PASS_TOKENS = 256  # of a pass in between
_LONGEST_S = 60.0  # that a text beyond all windows may take, by how long a short one took
# Of the logits' size. Rounding to bfloat16 makes differences of some hundredths, another form of attention of a half.
_TOLERANCE = 0.1


class MismatchError(Exception):
    """The engine computes something else than the model."""


class OwnLogits(NamedTuple):
    """float32 `logits` [_TOKENS, vocabulary] of the end of a `text`, as computed by a model without an engine."""

    text: list[int]
    logits: torch.Tensor


@torch.inference_mode()
def own_logits(model: Any, context_tokens: int) -> OwnLogits:
    """Of a `model` that no engine has taken over yet. The text is as long as it takes to be beyond all windows that
    matter in texts of `context_tokens`."""
    begun = perf_counter()
    short = _own_logits(model, _TOKENS)
    seconds = perf_counter() - begun
    windows = [window for window in _windows(model.config) if window < context_tokens - _TOKENS]
    if not windows:
        return short
    tokens = max(windows) + _TOKENS
    if 2 * seconds * tokens / _TOKENS > _LONGEST_S:
        logging.getLogger(__name__).warning(
            "windows of %s tokens are checked by the model's masks alone: computing beyond them takes long here",
            windows,
        )
        return short
    return _own_logits(model, tokens)


@torch.inference_mode()
def check(engine: Engine, expected: OwnLogits) -> None:
    """`expected`: of its model. Raises MismatchError, and what a forward pass raises."""
    found = _logits_in_passes(engine, expected.text)
    centred = expected.logits - expected.logits.mean(-1, keepdim=True)
    difference = float((found - found.mean(-1, keepdim=True) - centred).norm() / centred.norm())
    if not bool(expected.logits.isfinite().all()):
        raise MismatchError("its own logits are no numbers (NaN or infinite): its weights are damaged")
    if not difference <= _TOLERANCE:  # a NaN is a mismatch, too
        raise MismatchError(f"logits in blocks and passes differ from its own by {difference:.0%}")


def _own_logits(model: Any, tokens: int) -> OwnLogits:
    size = text_config(model.config).vocab_size
    text = [(7 + 31 * i * i) % size for i in range(tokens)]
    ids = torch.tensor([text], device=model.device)
    with given_rows(model.get_output_embeddings(), torch.arange(tokens - _TOKENS, tokens, device=model.device)):
        logits: torch.Tensor = model(ids, use_cache=False).logits[0]
    return OwnLogits(text, logits.float())


def _windows(config: Any) -> set[int]:
    """How many tokens back a token sees, in layers of which the configuration says that."""
    found = {getattr(each, "sliding_window", None) for each in layer_configs(text_config(config))}
    return {window for window in found if isinstance(window, int) and window > 0}


def _logits_in_passes(engine: Engine, text: list[int]) -> torch.Tensor:
    ends = [len(text) - _LAST, len(text)]
    ends[:0] = range(_PASS_TOKENS, ends[0], _PASS_TOKENS)
    kv, parts = KV(engine.pool), []
    for start, end in zip([0, *ends], ends, strict=False):
        kv.extend(end - start)
        wanted = min(max(len(text) - _TOKENS - start, 0), end - start)
        passed = engine.target.forward([InputSequence(kv, start, text[start:end], wanted)])
        parts.append(passed.logits.clone())
    kv.release()
    return torch.cat(parts)
