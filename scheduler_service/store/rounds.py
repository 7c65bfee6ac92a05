"""The stored form of a request's output: its rounds one after the other, so that a replay is exact round by round.

A round is drafted u8, accepted u8, count u16, then `count` token ids u32, little-endian. Where the highest bit of the
count is set, log-probabilities follow: their length in bytes u32, and that message.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_TOKENS = 0x7FFF
_HEAD = struct.Struct("<BBH")
_LENGTH = struct.Struct("<I")
_LOGPROBS = 0x8000


class LoggedRound(NamedTuple):
    start: int  # output tokens before
    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    logprobs: bytes = b""  # a serialized types.Logprobs


def encode(tokens: Sequence[int], drafted: int, accepted: int, logprobs: bytes = b"") -> bytes:
    """Raises struct.error if a count or an id is out of range, ValueError for more than MAX_TOKENS."""
    if len(tokens) > MAX_TOKENS:
        raise ValueError(f"{len(tokens)} tokens in a round, of at most {MAX_TOKENS}")
    head = _HEAD.pack(drafted, accepted, len(tokens) | (_LOGPROBS if logprobs else 0))
    tail = _LENGTH.pack(len(logprobs)) + logprobs if logprobs else b""
    return head + struct.pack(f"<{len(tokens)}I", *tokens) + tail


def decode(log: bytes) -> Iterator[LoggedRound]:
    """Raises struct.error if the log is cut short."""
    at = start = 0
    while at < len(log):
        drafted, accepted, count = _HEAD.unpack_from(log, at)
        more, count = count & _LOGPROBS, count & MAX_TOKENS
        tokens = struct.unpack_from(f"<{count}I", log, at + _HEAD.size)
        at += _HEAD.size + 4 * count
        logprobs = b""
        if more:
            (length,) = _LENGTH.unpack_from(log, at)
            at += _LENGTH.size + length
            logprobs = bytes(log[at - length : at])
            if len(logprobs) < length:
                raise struct.error("log-probabilities are cut short")
        yield LoggedRound(start, tokens, drafted, accepted, logprobs)
        start += count
