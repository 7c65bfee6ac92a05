"""The keys of several groups in one order. It is found in plain numbers, those that keys are compared by: then Python
compares no class and no flow, which is slow. A group is a ranking of keys of the same class and flow.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from heapq import merge
from itertools import chain, islice
from operator import itemgetter
from typing import Any

from scheduler_service.core.ranking import Changes, Key, Ranking

FEW = 512  # keys, whose whole order is kept
LEAST_FRONT = 64  # keys


class Front:
    """The best keys of `groups` in order, as many as were asked for and some more. `changes`: of classes and flows.

    Each key is kept in plain numbers. What is added, removed or moved is so here, too. When classes or flows have
    changed places, all keys are put in order again, or the front is given up. One that is missing or too short is read
    anew from the groups with the best heads.
    """

    __slots__ = ("_at", "_changes", "_groups", "_heads", "_keys", "_whole")

    def __init__(self, groups: Mapping[Key, Ranking], changes: Changes) -> None:
        self._groups, self._changes = groups, changes
        self._heads = Heads(groups)
        self._keys: list[Key] | None = None  # None: nobody has asked, or it was given up
        self._at = 0  # it is in order after so many changes
        self._whole = False  # these are all keys

    def best(self, count: int, length: int) -> list[Key]:
        """A front of at least `count` keys of all `length`, or all of them."""
        keys = self._in_order()
        if keys is None or (len(keys) < count and not self._whole):
            if length <= FEW:
                keys = sorted(map(_plain, chain.from_iterable(self._groups.values())))
            else:
                most = max(2 * count, LEAST_FRONT)
                keys = list(islice(_merged(self._heads.best(most)), most))
            self._keys, self._at, self._whole = keys or None, self._changes.count, len(keys) == length
        return keys

    def changed(self, name: Key, old: Key | None, new: Key | None) -> None:
        """`new` came for `old` in the group of that name; None: none did, or there was none."""
        self._heads.changed(name)
        if self._keys is None or (keys := self._in_order()) is None:
            return
        if old is not None and ((place := _plain(old)) <= keys[-1] or self._whole):
            del keys[bisect_left(keys, place)]
        if new is not None and (self._whole or (keys and _plain(new) < keys[-1])):
            insort(keys, _plain(new))
        if not keys or (self._whole and len(keys) > FEW):
            self._keys = None

    def give_up(self) -> None:
        """Until somebody asks."""
        self._keys = None

    def _in_order(self) -> list[Key] | None:
        """As classes and flows stand now."""
        if self._keys is not None and self._at != self._changes.count:
            self._at = self._changes.count
            self._keys = sorted([_plain(place[-1]) for place in self._keys]) if self._whole else None
        return self._keys


class Heads:
    """The best key of each group in plain numbers, with the group's name in place of the key.

    Each is renewed when it is looked at: its group may have changed since, and is marked as stale, or the virtual time
    of its flow may have grown, so that it stands too far in front.
    """

    __slots__ = ("_by_class", "_groups", "_of", "_stale")

    def __init__(self, groups: Mapping[Key, Ranking]) -> None:
        self._groups = groups
        self._of: dict[Key, Key] = {}  # each group, as it stands in `_by_class`
        self._by_class: dict[Any, Ranking] = {}  # empty: nobody has asked, or it was given up
        self._stale: set[Key] = set()

    def changed(self, name: Key) -> None:
        if self._by_class:
            self._stale.add(name)

    def best(self, count: int) -> Iterable[Ranking]:
        """Groups that have the best `count` keys among them."""
        if len(self._groups) <= count:
            self._of, self._by_class, self._stale = {}, {}, set()
            return self._groups.values()
        if not self._by_class:
            self._stale = set(self._groups)
        while True:
            for name in self._stale:
                self._renew(name)
            best = [head for heads in self._by_class.values() for head in heads.first(count)]
            self._stale = {head[-1] for head in best if head[1] != head[-1][2].grain}
            if not self._stale:
                return [self._groups[head[-1]] for head in best]

    def _renew(self, name: Key) -> None:
        _, klass, flow = name
        heads = self._by_class.setdefault(klass, Ranking())
        if (old := self._of.pop(name, None)) is not None:
            heads.remove(old)
        if (group := self._groups.get(name)) is not None:
            new, _, _, *rest = group.best
            head = self._of[name] = (new, flow.grain, *rest, name)
            heads.add(head)


def in_order(keys: list[Key]) -> list[Key]:
    """Sorted. Where there are several flows, plain numbers are compared: a flow's own comparison is slow."""
    return sorted(keys, key=_plain if len({key[2] for key in keys}) > 1 else None)


def merged(groups: Iterable[Iterable[Key]]) -> Iterator[Key]:
    """Several that are in order, in one order: that of classes and flows as they stand now."""
    return map(itemgetter(-1), _merged(groups))


def _merged(groups: Iterable[Iterable[Key]]) -> Iterator[Key]:
    """In plain numbers."""
    return merge(*(map(_plain, group) for group in groups))


def _plain(key: Key) -> Key:
    """What `key` is compared by, in numbers, and the key."""
    return (key[0], not key[1].due, key[1].klass, key[2].grain, key[3:], key)
