"""The stored form of a request's output: its rounds one after the other, so that a replay is exact round by round.
No Redis lives here.

A round is drafted u8, accepted u8, count u16, then `count` token ids u32, all little-endian. If the highest bit of the
count is set, log-probabilities follow: their length in bytes u32, then a serialized types.Logprobs.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

MAX_TOKENS = 0x7FFF
_HEAD = struct.Struct("<BBH")
_LENGTH = struct.Struct("<I")
_LOGPROBS = 0x8000


class LoggedRound(NamedTuple):
    start: int  # output tokens before this round
    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    logprobs: bytes = b""  # a serialized types.Logprobs

    @property
    def size(self) -> int:
        """Bytes of it in a log."""
        return _HEAD.size + 4 * len(self.tokens) + (_LENGTH.size + len(self.logprobs) if self.logprobs else 0)


def encode(tokens: Sequence[int], drafted: int, accepted: int, logprobs: bytes = b"") -> bytes:
    """One round. Raises struct.error if a count or an id is out of range, ValueError for more than MAX_TOKENS."""
    if len(tokens) > MAX_TOKENS:
        raise ValueError(f"{len(tokens)} tokens in a round, of at most {MAX_TOKENS}")
    count = len(tokens)
    if not logprobs:
        return _packer(count)(drafted, accepted, count, *tokens)
    head = _packer(count)(drafted, accepted, count | _LOGPROBS, *tokens)
    return head + _LENGTH.pack(len(logprobs)) + logprobs


@lru_cache(maxsize=512)
def _packer(count: int) -> Callable[..., bytes]:
    """Of a round of so many tokens: its head and its tokens."""
    return struct.Struct(f"<BBH{count}I").pack


def decode(log: bytes | bytearray, at: int = 0, start: int = 0) -> Iterator[LoggedRound]:
    """The rounds of a log, in order, from byte `at` on: the one that begins there has `start` output tokens before it.
    Raises struct.error if the log is cut short."""
    for begin, end, drafted, accepted, count in _heads(log, at):
        tokens = struct.unpack_from(f"<{count}I", log, begin)
        logprobs = bytes(log[begin + 4 * count + _LENGTH.size : end])
        yield LoggedRound(start, tokens, drafted, accepted, logprobs)
        start += count


def count(log: bytes) -> int:
    """How many tokens a log holds; far cheaper than `decode`. Raises struct.error if the log is cut short."""
    return sum(count for *_, count in _heads(log))


def logprobs(log: bytes) -> Iterator[bytes]:
    """Of the rounds that have any: a serialized types.Logprobs each. Raises struct.error if the log is cut short."""
    for begin, end, _, _, count in _heads(log, 0):
        if (at := begin + 4 * count) < end:
            yield log[at + _LENGTH.size : end]


def shapes(log: bytes | bytearray, at: int = 0) -> Iterator[tuple[int, int, int]]:
    """Tokens, drafted and accepted of each round from byte `at` on; far cheaper than `decode`. Raises struct.error if
    the log is cut short."""
    return ((count, drafted, accepted) for _, _, drafted, accepted, count in _heads(log, at))


def _heads(log: bytes | bytearray, at: int = 0) -> Iterator[tuple[int, int, int, int, int]]:
    """Of each round from byte `at` on: where its tokens begin, where it ends, drafted, accepted, tokens."""
    while at < len(log):
        drafted, accepted, word = _HEAD.unpack_from(log, at)
        at += _HEAD.size
        end = at + 4 * (word & MAX_TOKENS)
        if word & _LOGPROBS:
            (length,) = _LENGTH.unpack_from(log, end)
            end += _LENGTH.size + length
        if end > len(log):
            raise struct.error(f"a round ends at byte {end}, the log at {len(log)}")
        yield at, end, drafted, accepted, word & MAX_TOKENS
        at = end
