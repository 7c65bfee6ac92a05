"""Blocks of KV memory: which request uses which, and which hold the beginning of a text that others may share. No
tensors here.

A block holds the keys and values of `block_tokens` tokens in all layers. A request has a table of blocks. A full block
whose tokens are verified is published under a digest of all the text up to its end, and every request that begins with
the same text shares it. A published block is never written again, so sharing needs no copies.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


class BlockPool:
    """Reference counts of all blocks. Unused published blocks count as free, and the least recently used goes first."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.blocks, self.block_tokens = blocks, block_tokens
        self.references = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, and used by no request
        self._published: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}  # of published blocks

    @property
    def free_blocks(self) -> int:
        return len(self._free) + len(self._idle)

    def take(self) -> int:
        """A block that the caller alone uses. There must be a free one."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._published[self._digests.pop(block)]
        self.references[block] = 1
        return block

    def share(self, digest: bytes) -> int | None:
        """One more reference to the block that holds this text, if there is one."""
        block = self._published.get(digest)
        if block is not None:
            self._idle.pop(block, None)
            self.references[block] += 1
        return block

    def give(self, block: int) -> None:
        """One reference less."""
        self.references[block] -= 1
        if self.references[block] == 0:
            if block in self._digests:
                self._idle[block] = None
            else:
                self._free.append(block)

    def publish(self, block: int, digest: bytes) -> None:
        """The block is full and will not be written again. A block that has this digest already keeps it."""
        if self._published.setdefault(digest, block) == block:
            self._digests[block] = digest


@dataclass(frozen=True, slots=True)
class Fork:
    """Blocks for another continuation of a request's text. `table`: like the request's own up to block `first`, from
    which on nobody shares them. `source`: as in QueryRange."""

    table: "array[int]"
    first: int
    source: int


class KV:
    """The table of one request: the blocks of its first `length` tokens, and perhaps some more behind them."""

    def __init__(self, pool: BlockPool, salt: str = "") -> None:
        """Blocks are shared among the tables of equal `salt`, and no others."""
        self._pool, self._salt = pool, blake2b(salt.encode(), digest_size=16).digest()
        self._digests: list[bytes] = []  # of its first blocks: those that are published
        self.table = array("i")
        self.length = 0

    @property
    def blocks(self) -> int:
        return len(self.table)

    @property
    def used_blocks(self) -> int:
        """How many blocks hold something of its first `length` tokens."""
        return -(-self.length // self._pool.block_tokens)

    @property
    def private_blocks(self) -> int:
        """How many blocks no other request shares: as many become free when it is released."""
        references = self._pool.references
        return sum(1 for block in self.table if references[block] == 1)

    @property
    def room(self) -> int:
        """How many tokens can still be added, with all the free blocks of the pool."""
        return (self.blocks + self._pool.free_blocks) * self._pool.block_tokens - self.length

    @property
    def own_room(self) -> int:
        """How many tokens can still be added without a new block."""
        return self.blocks * self._pool.block_tokens - self.length

    def adopt(self, tokens: Sequence[int]) -> None:
        """Share published blocks that continue this text from `length` on, but leave the last token to be computed."""
        size = self._pool.block_tokens
        while self.length == self.blocks * size == len(self._digests) * size and self.length + size < len(tokens):
            digest = self._digest(tokens)
            block = self._pool.share(digest)
            if block is None:
                return
            self.table.append(block)
            self._digests.append(digest)
            self.length += size

    def publish(self, tokens: Sequence[int]) -> None:
        """Let others use its full blocks of `tokens`, which must be verified, as far as they are computed."""
        while (len(self._digests) + 1) * self._pool.block_tokens <= min(self.length, len(tokens)):
            digest = self._digest(tokens)
            self._pool.publish(self.table[len(self._digests)], digest)
            self._digests.append(digest)

    def _digest(self, tokens: Sequence[int]) -> bytes:
        """The digest of the text up to the end of the first block that has none yet."""
        size, done = self._pool.block_tokens, len(self._digests)
        before = self._digests[-1] if done else self._salt
        return blake2b(before + array("i", tokens[done * size : (done + 1) * size]).tobytes(), digest_size=16).digest()

    def extend(self, tokens: int) -> None:
        """Make place for `tokens` more (at most `room`), and count them as held: the next forward pass writes them."""
        self.length += tokens
        while self.blocks * self._pool.block_tokens < self.length:
            self.table.append(self._pool.take())

    def truncate(self, length: int) -> None:
        """Forget what follows the first `length` tokens. Its blocks stay, to be written again.

        Published blocks cannot be written: if the text ends within one, that whole block is given back.
        """
        self.length = min(self.length, length)
        full = self.length // self._pool.block_tokens
        if len(self._digests) > full:
            self._release_from(full)
            self.length = full * self._pool.block_tokens

    def fork(self, start: int, tokens: int) -> Fork | None:
        """Place for `tokens` tokens that follow the first `start` otherwise than those here. None: too few blocks are
        free. There may be several, each from this same beginning. Each ends with `merge`, one at most, or `abandon`,
        before the table or the length is changed otherwise."""
        size = self._pool.block_tokens
        first, count = start // size, -(-(start + tokens) // size)
        if self._pool.free_blocks < count - first:
            return None
        own = array("i", [self._pool.take() for _ in range(first, count)])
        return Fork(self.table[:first] + own, first, self.table[first] if start % size else -1)

    def merge(self, fork: Fork, length: int) -> None:
        """The fork's text turned out to be this request's: its first `length` tokens are held from now on."""
        replaced = self.table[fork.first : len(fork.table)]
        self.table[fork.first : len(fork.table)] = fork.table[fork.first :]
        self.length = length
        for block in replaced:
            self._pool.give(block)

    def abandon(self, fork: Fork) -> None:
        for block in fork.table[fork.first :]:
            self._pool.give(block)

    def release(self) -> None:
        """Give everything back."""
        self._release_from(0)
        self.length = 0

    def _release_from(self, first: int) -> None:
        for block in reversed(self.table[first:]):  # so that of an idle text the end is forgotten first
            self._pool.give(block)
        del self.table[first:], self._digests[first:]
