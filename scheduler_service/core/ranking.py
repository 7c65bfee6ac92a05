"""A set of request ids in the order of their claims. Knows nothing of requests."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain
from typing import Any

Key = tuple[Any, ...]  # ends with the id, so that no two are equal

CHUNK = 512  # keys; a chunk twice as long is split


class Changes:
    """How often classes or tenants have changed places, so that an order of requests can be kept until then."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Ranking:
    """A sorted list in chunks: a change moves the pointers of one chunk, however many requests there are."""

    __slots__ = ("_chunks", "_lasts", "_length")

    def __init__(self) -> None:
        self._chunks: list[list[Key]] = []  # none is empty
        self._lasts: list[Key] = []  # the last key of each
        self._length = 0

    def add(self, key: Key) -> None:
        if not self._chunks:
            self._chunks.append([])
            self._lasts.append(key)
        at = min(bisect_left(self._lasts, key), len(self._lasts) - 1)
        chunk = self._chunks[at]
        insort(chunk, key)
        self._length += 1
        if len(chunk) > 2 * CHUNK:
            self._chunks.insert(at + 1, chunk[CHUNK:])
            self._lasts.insert(at + 1, chunk[-1])
            del chunk[CHUNK:]
        self._lasts[at] = chunk[-1]

    def remove(self, key: Key) -> None:
        """Raises KeyError if it is not there."""
        at = bisect_left(self._lasts, key)
        chunk = self._chunks[at] if at < len(self._chunks) else []
        index = bisect_left(chunk, key)
        if index == len(chunk) or chunk[index] != key:
            raise KeyError(key)
        del chunk[index]
        self._length -= 1
        if chunk:
            self._lasts[at] = chunk[-1]
        else:
            del self._chunks[at], self._lasts[at]

    def move(self, old: Key, new: Key) -> None:
        """`new` for `old`, mostly within a chunk. Raises KeyError if `old` is not there."""
        at = bisect_left(self._lasts, old)
        chunk = self._chunks[at] if at < len(self._chunks) else []
        index = bisect_left(chunk, old)
        if index == len(chunk) or chunk[index] != old:
            raise KeyError(old)
        # Mostly it keeps its place: two comparisons show that, where finding another takes several.
        if index + 1 < len(chunk) and new < chunk[index + 1] and (chunk[index - 1] < new if index else not at):
            chunk[index] = new
            return
        after_chunk_before = not at or self._lasts[at - 1] < new
        if after_chunk_before and (at == len(self._lasts) - 1 or new < self._lasts[at]):
            del chunk[index]
            insort(chunk, new)
            self._lasts[at] = chunk[-1]
        else:
            self.remove(old)
            self.add(new)

    @property
    def best(self) -> Key:
        """The first one. Raises IndexError if there is none."""
        return self._chunks[0][0]

    def at(self, place: int) -> Key | None:
        """The key that so many others go before; None if there are not as many."""
        if self._chunks and place < len(self._chunks[0]):
            return self._chunks[0][place]
        return next(self.beyond(place), None)

    def first(self, count: int) -> list[Key]:
        """The best `count`, or all if there are fewer."""
        keys: list[Key] = []
        for chunk in self._chunks:
            keys += chunk[: count - len(keys)]
            if len(keys) == count:
                break
        return keys

    def beyond(self, count: int) -> Iterator[Key]:
        """All but the best `count`."""
        for chunk in self._chunks:
            yield from chunk[count:]
            count = max(0, count - len(chunk))

    def before(self, key: Key) -> int:
        """How many go before `key`."""
        at = bisect_left(self._lasts, key)
        whole = sum(map(len, self._chunks[:at]))
        return whole + (bisect_left(self._chunks[at], key) if at < len(self._chunks) else 0)

    def __iter__(self) -> Iterator[Key]:
        return chain.from_iterable(self._chunks)

    def __reversed__(self) -> Iterator[Key]:
        return chain.from_iterable(map(reversed, reversed(self._chunks)))

    def __len__(self) -> int:
        return self._length
