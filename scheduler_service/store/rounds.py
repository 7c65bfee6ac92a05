"""The stored form of a request's output: its rounds one after the other, so that a replay is exact round by round.

A round is drafted u8, accepted u8, count u16, then `count` token ids u32, little-endian.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_HEAD = struct.Struct("<BBH")


class LoggedRound(NamedTuple):
    start: int  # output tokens before
    tokens: tuple[int, ...]
    drafted: int
    accepted: int


def encode(tokens: Sequence[int], drafted: int, accepted: int) -> bytes:
    """Raises struct.error if a count or an id is out of range."""
    return _HEAD.pack(drafted, accepted, len(tokens)) + struct.pack(f"<{len(tokens)}I", *tokens)


def decode(log: bytes) -> Iterator[LoggedRound]:
    """Raises struct.error if the log is cut short."""
    at = start = 0
    while at < len(log):
        drafted, accepted, count = _HEAD.unpack_from(log, at)
        tokens = struct.unpack_from(f"<{count}I", log, at + _HEAD.size)
        yield LoggedRound(start, tokens, drafted, accepted)
        at += _HEAD.size + 4 * count
        start += count
