"""A set of request ids in the order of their claims. Knows nothing of requests."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

Key = tuple[Any, ...]  # ends with the id, so that no two are equal


class Ranking:
    """A sorted list: it moves pointers rather than allocates, which up to 100,000 entries beats any tree in Python."""

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys: list[Key] = []

    def add(self, key: Key) -> None:
        insort(self._keys, key)

    def remove(self, key: Key) -> None:
        """Raises KeyError if it is not there."""
        index = bisect_left(self._keys, key)
        if index == len(self._keys) or self._keys[index] != key:
            raise KeyError(key)
        del self._keys[index]

    def first(self, count: int) -> list[Key]:
        """The best `count`, or all if there are fewer."""
        return self._keys[:count]

    def before(self, key: Key) -> int:
        """How many go before `key`."""
        return bisect_left(self._keys, key)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __reversed__(self) -> Iterator[Key]:
        return reversed(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
