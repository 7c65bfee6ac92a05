"""The keys of several groups in one order. A group is a ranking of keys of the same class and flow.

To compare the classes and flows of two keys is slow in Python. So the order is found of plain places: the numbers that
a key is compared by as classes and flows stand now, then the key.
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
    """The plain places of the best keys of `groups`, in order: all of them where there are at most FEW keys, else as
    many as were asked for and some more. `changes`: of classes and flows.

    A front follows each key that is added, removed or moved in a group. When classes or flows have changed places, a
    whole front is put in order again, and another one is forgotten. A front that is missing or too short is read anew
    from the groups with the best heads.
    """

    __slots__ = ("_at", "_changes", "_groups", "_heads", "_places", "_whole")

    def __init__(self, groups: Mapping[Key, Ranking], changes: Changes) -> None:
        self._groups, self._changes = groups, changes
        self._heads = Heads(groups)
        self._places: list[Key] | None = None  # None: there is no front
        self._at = 0  # it is in order after so many changes
        self._whole = False  # these are all keys

    def best(self, count: int, length: int) -> list[Key]:
        """The plain places of at least `count` of all `length` keys; of all of them if there are fewer."""
        places = self._in_order()
        if places is None or (len(places) < count and not self._whole):
            if length <= FEW:
                places = sorted(map(_plain, chain.from_iterable(self._groups.values())))
            else:
                most = max(2 * count, LEAST_FRONT)
                places = list(islice(_merged(self._heads.best(most)), most))
            self._places, self._at, self._whole = places or None, self._changes.count, len(places) == length
        return places

    def changed(self, name: Key, old: Key | None, new: Key | None) -> None:
        """In the group of that name `new` was added (`old` None), `old` removed (`new` None), or replaced by `new`."""
        self._heads.changed(name)
        if self._places is None or (places := self._in_order()) is None:
            return
        if old is not None and ((place := _plain(old)) <= places[-1] or self._whole):
            del places[bisect_left(places, place)]
        if new is not None and (self._whole or (places and _plain(new) < places[-1])):
            insort(places, _plain(new))
        if not places or (self._whole and len(places) > FEW):
            self._places = None

    def forget(self) -> None:
        """Keep no front until somebody asks for one."""
        self._places = None

    def _in_order(self) -> list[Key] | None:
        """As classes and flows stand now."""
        if self._places is not None and self._at != self._changes.count:
            self._at = self._changes.count
            self._places = sorted([_plain(place[-1]) for place in self._places]) if self._whole else None
        return self._places


class Heads:
    """The head of each group: the plain place of its best key, without the numbers of its class, since each class has a
    ranking of its own here, and with the group's name in place of the key.

    A head is renewed when it is looked at: its group may have changed since, and is marked as stale, or the virtual
    time of its flow may have grown, so that the head stands too far in front.
    """

    __slots__ = ("_by_class", "_groups", "_of", "_stale")

    def __init__(self, groups: Mapping[Key, Ranking]) -> None:
        self._groups = groups
        self._of: dict[Key, Key] = {}  # each group, as it stands in `_by_class`
        self._by_class: dict[Any, Ranking] = {}  # empty: no heads are kept
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


def merged(rankings: Iterable[Iterable[Key]]) -> Iterator[Key]:
    """The keys of several rankings in one order: that of classes and flows as they stand now."""
    return map(itemgetter(-1), _merged(rankings))


def _merged(rankings: Iterable[Iterable[Key]]) -> Iterator[Key]:
    """Their plain places."""
    return merge(*(map(_plain, ranking) for ranking in rankings))


def _plain(key: Key) -> Key:
    """The plain place of `key`."""
    return (key[0], not key[1].due, key[1].klass, key[2].grain, key[3:], key)
