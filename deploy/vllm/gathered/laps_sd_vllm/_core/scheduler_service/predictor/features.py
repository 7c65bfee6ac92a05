"""What a predictor is told of a request, live and simulated. Standard library only; nothing is learned here."""

import math
from collections.abc import Sequence
from itertools import pairwise

from laps_sd_vllm._core.scheduler_service.predictor.port import Features

ENDS = 128  # tokens of a prompt that are looked at, at each of its ends: instructions stand there
PLACES = 4  # tokens at either end whose place matters


def of_prompt(
    tokens: Sequence[int], max_tokens: int, klass: int, *, stop: Sequence[str] = (), ignore_eos: bool = False
) -> Features:
    """Live: the prompt's token ids, and what may end the answer."""
    seen = [*tokens[:ENDS], *tokens[-ENDS:]] if len(tokens) > 2 * ENDS else tokens
    distinct = set(seen)
    weight = 2 / math.sqrt(max(1, len(distinct)))  # so that long prompts do not outweigh short ones
    features = {f"token {token}": weight for token in distinct}
    features |= {f"first {place} {token}": 0.5 for place, token in enumerate(seen[:PLACES])}
    features |= {f"last {place} {token}": 0.5 for place, token in enumerate(reversed(seen[-PLACES:]))}
    features |= {f"pair {one} {two}": 0.3 for one, two in pairwise(seen[: 2 * PLACES])}
    ends = [f"stop {text}" for text in stop] or ["no stop"]
    features |= dict.fromkeys([*ends, *(["ignore_eos"] if ignore_eos else [])], 2 / math.sqrt(len(ends)))
    return features | _size("prompt", len(tokens)) | _size("max_tokens", max_tokens) | {f"class {klass}": 1.0}


def of_category(category: str, prompt_tokens: int, klass: int) -> Features:
    """Simulated: there is no prompt, but a file may say of what kind a request is."""
    size = _log(prompt_tokens)
    kind = {f"category {category}": 1.0, f"category {category} size": size} if category else {}
    return kind | _size("prompt", prompt_tokens) | {f"class {klass}": 1.0}


def _size(name: str, tokens: int) -> dict[str, float]:
    size = _log(tokens)
    return {f"{name} size": size, f"{name} size squared": size * size, f"{name} about 2^{tokens.bit_length()}": 1.0}


def _log(tokens: int) -> float:
    """About 0 for a hundred tokens, about 1 for a thousand."""
    return (math.log(tokens + 1) - 4.6) / 2.3
