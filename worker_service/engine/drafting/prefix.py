"""The digest of a text's beginning, by which a worker and a drafter elsewhere know that they mean the same tokens. It
guards against mistakes, not against malice: a drafter may guess what it likes."""

from collections.abc import Iterable

EMPTY = 0  # of no tokens

_MODULUS = (1 << 61) - 1  # a prime
_BASE = 0x1B873593CC9E2D51


def extended(digest: int, tokens: Iterable[int]) -> int:
    """The digest of a text whose beginning has `digest`, with `tokens` after it. Below 2**61."""
    for token in tokens:
        digest = (digest * _BASE + token + 1) % _MODULUS
    return digest
