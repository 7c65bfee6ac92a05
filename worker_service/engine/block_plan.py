"""Where the tokens of a pass and their keys and values are, as flat arrays of numpy: of each query range, of each
token, and, for attention that gathers, of groups that are padded. All are int32."""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int32]]


class QueryRange(NamedTuple):
    """The packed tokens begin..begin + n of a pass: they are those of one text from position `start` on."""

    begin: int
    n: int
    start: int
    table: "array[int]"  # the text's blocks, in order
    source: int = -1  # block whose tokens before `start` are this text's, too; -1: the text's own blocks have all


class BlockPlan:
    """Of the ranges of a pass, which follow each other without gaps."""

    def __init__(self, ranges: Sequence[QueryRange], block_tokens: int) -> None:
        self._size = block_tokens
        self.begin, self.n, self.start = np.array([r[:3] for r in ranges], np.int32).reshape(-1, 3).T
        self.blocks = (self.start + self.n - 1) // block_tokens + 1  # of each range, up to its last token
        self.source = np.array([r.source for r in ranges], np.int32)
        self.offsets = _from_zero(self.blocks)  # [ranges + 1]: where each range's blocks are in `indices`
        parts = [np.asarray(r.table, np.int32)[:count] for r, count in zip(ranges, self.blocks.tolist(), strict=True)]
        self.indices = np.concatenate([*parts, np.empty(0, np.int32)])

    @property
    def first_tokens(self) -> Ints:
        """[ranges + 1]: where each range's tokens are in the pass."""
        return _from_zero(self.n)

    @property
    def last_block_tokens(self) -> Ints:
        """[ranges]: how many tokens of the last block there are, from 1 on."""
        return (self.start + self.n - 1) % self._size + 1

    def places(self) -> tuple[Ints, Ints]:
        """Of each token of the pass: its block, and its place there."""
        owner = np.repeat(np.arange(len(self.n), dtype=np.int32), self.n)
        at = np.arange(len(owner), dtype=np.int32) + (self.start - self.begin)[owner]
        return self.indices[self.offsets[owner] + at // self._size], at % self._size

    def copies(self) -> tuple[Ints, Ints, Ints]:
        """Of each token that a range has of its source: the block where it is, the block where the range's own table
        has it, and its place in either. Some are tokens of this pass."""
        owner = np.flatnonzero(self.source >= 0)
        counts = self.start[owner] % self._size
        to = self.indices[self.offsets[owner] + self.start[owner] // self._size]
        places = np.arange(counts.sum(), dtype=np.int32) - np.repeat(_from_zero(counts)[:-1], counts)
        return np.repeat(self.source[owner], counts), np.repeat(to, counts), places

    def begun(self) -> Ints:
        """Blocks that this pass begins to write or copy and does not fill: the rest of them is what a former text left.
        A range has one at most, its last."""
        end = self.start + self.n
        begins = (end // self._size * self._size >= self.start) | (self.source >= 0)
        return self.indices[self.offsets[1:] - 1][begins & (end % self._size > 0)]

    def groups(self, short: int) -> list[Ints]:
        """Ranges that are computed together: of at most `short` tokens those of about the same past, each longer one by
        itself. A group's shortest past has more than half as many blocks as its longest: padding at most doubles it."""
        powers = np.frexp(self.blocks)[1]
        keys = np.where(self.n <= short, -powers, np.arange(len(self.n)))
        return [np.flatnonzero(keys == key).astype(np.int32) for key in np.unique(keys)]

    def padded(self, group: Ints) -> tuple[Ints, Ints, Ints]:
        """Of these ranges the tokens [B, longest] and their positions, and the blocks [B, most]. Padding repeats the
        last token or block. It costs time, and its results are not used."""
        n, blocks = self.n[group, None], self.blocks[group, None]
        token = np.minimum(np.arange(n.max(), dtype=np.int32), n - 1)
        block = np.minimum(np.arange(blocks.max(), dtype=np.int32), blocks - 1)
        tables = self.indices[self.offsets[group, None] + block]
        return self.begin[group, None] + token, self.start[group, None] + token, tables


def _from_zero(counts: Ints) -> Ints:
    """Where each of `counts` begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
