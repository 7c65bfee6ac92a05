"""Requests of several classes and flows in one order, though these change places. No account lives here.

A key holds the class and the flow as such, and compares as they stand now. So the keys of each flow are a ranking
of their own, a group, which nobody else's virtual time can put out of order. Where groups are few they follow one
another as they stand, and those that stand equal are merged. Else the order of all is kept in plain numbers beside
them: whole where keys are few, else its front, as far as it was asked for.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator
from heapq import merge
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any

from scheduler_service.core.ranking import Changes, Key, Ranking

GROUP = slice(0, 3)  # of a key: whether those that have begun go before it, class and flow
CLAIM = itemgetter(slice(3, None))  # of a key: all that is compared within a group
FEW_GROUPS = 4
FEW = 512  # keys, whose whole order is kept
LEAST_FRONT = 64  # keys


class FairRanking:
    """`changes`: those of the classes and flows.

    The front holds for each of its keys the plain numbers of its place, then the key. What is added, removed or moved
    is so there, too. When classes or flows have changed places, it is put in order again. One that has become too
    short is read anew from the groups with the best heads. A head is the best key of its group in plain numbers. It
    is renewed when it is looked at: a group may have changed since, and is marked as `_stale`, or its
    virtual time may have grown, so that the head stands too far in front.
    """

    __slots__ = (
        "_changes",
        "_equal",
        "_front",
        "_front_at",
        "_groups",
        "_head",
        "_heads",
        "_length",
        "_stale",
        "_whole",
    )

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._front: list[Key] | None = None  # the best keys, in order, after so many changes:
        self._front_at = 0
        self._whole = False  # these are all keys
        self._groups: dict[Key, Ranking] = {}  # none is empty
        self._length = 0
        self._head: dict[Key, Key] = {}  # of each group, as it stands in `_heads`
        self._heads: dict[Any, Ranking] = {}  # by class
        self._stale: set[Key] = set()
        # Of few groups, for those that stood equal at some time: the claims of all their keys, in order, with the keys.
        self._equal: dict[frozenset[Key], list[tuple[Key, Key]]] = {}

    def add(self, key: Key) -> None:
        name = key[GROUP]
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Ranking()
            self._equal.clear()
        group.add(key)
        self._length += 1
        if self._length > FEW:
            self._equal.clear()
        self._changed(name, None, key)

    def remove(self, key: Key) -> None:
        """Raises KeyError if it is not there."""
        name = key[GROUP]
        group = self._groups[name]
        group.remove(key)
        self._length -= 1
        if not len(group):
            del self._groups[name]
            if len(self._groups) <= FEW_GROUPS:
                self._front = None
            self._equal.clear()
        self._changed(name, key, None)

    def move(self, old: Key, new: Key) -> None:
        """`new` for `old`, of the same request. Raises KeyError if `old` is not there."""
        if old[0] == new[0] and old[1] is new[1] and old[2] is new[2]:
            name = new[GROUP]
            self._groups[name].move(old, new)
            self._changed(name, old, new)
        else:
            self.remove(old)
            self.add(new)

    def _changed(self, name: Key, old: Key | None, new: Key | None) -> None:
        """A key of that group."""
        for names, claims in self._equal.items():
            if name in names:
                if old is not None:
                    del claims[bisect_left(claims, (CLAIM(old),))]
                if new is not None:
                    insort(claims, (CLAIM(new), new))
        if self._heads:
            self._stale.add(name)
        if self._front is None or (front := self._ordered_front()) is None:
            return
        if old is not None and ((plain := _plain(old)) <= front[-1] or self._whole):
            del front[bisect_left(front, plain)]
        if new is not None and (self._whole or (front and _plain(new) < front[-1])):
            insort(front, _plain(new))
        if not front or (self._whole and len(front) > FEW):
            self._front = None

    def _ordered_front(self) -> list[Key] | None:
        """The front as classes and flows stand now; None if there is none."""
        if self._front is not None and self._front_at != self._changes.count:
            self._front_at = self._changes.count
            self._front = sorted([_plain(plain[-1]) for plain in self._front]) if self._whole else None
        return self._front

    @property
    def groups(self) -> Collection[Key]:
        """The name of each, which ends with class and flow."""
        return self._groups.keys()

    def _best(self, count: int) -> list[Key]:
        """A front of at least `count` keys, or all if there are fewer."""
        front = self._ordered_front()
        if front is None or (len(front) < count and not self._whole):
            if self._length <= FEW:
                front = sorted(map(_plain, chain.from_iterable(self._groups.values())))
            else:
                most = max(2 * count, LEAST_FRONT)
                front = list(islice(_merged(self._with_best_heads(most)), most))
            self._front, self._front_at, self._whole = front or None, self._changes.count, len(front) == self._length
        return front

    def at(self, place: int) -> Key | None:
        """The key that so many others go before; None if there are not as many."""
        if place >= self._length:
            return None
        if len(self._groups) == 1:
            return next(iter(self._groups.values())).at(place)
        if len(self._groups) <= FEW_GROUPS:
            return next(self._of_few_groups(place), None)
        front = self._best(place + 1)
        return front[place][-1] if place < len(front) else None

    def first(self, count: int) -> list[Key]:
        """The best `count`, or all if there are fewer."""
        if not self._groups:
            return []
        if len(self._groups) == 1:
            return next(iter(self._groups.values())).first(count)
        if len(self._groups) <= FEW_GROUPS:
            return list(islice(self._of_few_groups(0), count))
        return [plain[-1] for plain in self._best(count)[:count]]

    def _with_best_heads(self, count: int) -> Iterable[Ranking]:
        """Groups that have the best `count` keys among them."""
        if len(self._groups) <= count:
            self._head, self._heads, self._stale = {}, {}, set()
            return self._groups.values()
        if not self._heads:
            self._stale = set(self._groups)
        while True:
            for name in self._stale:
                self._renew_head(name)
            best = [head for heads in self._heads.values() for head in heads.first(count)]
            self._stale = {head[-1] for head in best if head[1] != head[-1][2].grain}
            if not self._stale:
                return [self._groups[head[-1]] for head in best]

    def _renew_head(self, name: Key) -> None:
        """Of the group of that name."""
        _, klass, flow = name
        heads = self._heads.setdefault(klass, Ranking())
        if (old := self._head.pop(name, None)) is not None:
            heads.remove(old)
        if (group := self._groups.get(name)) is not None:
            new, _, _, *rest = group.best
            head = self._head[name] = (new, flow.grain, *rest, name)
            heads.add(head)

    def beyond(self, count: int) -> Iterator[Key]:
        """All but the best `count`, in order."""
        if count >= self._length:
            return
        if len(self._groups) == 1:
            yield from next(iter(self._groups.values())).beyond(count)
            return
        if len(self._groups) <= FEW_GROUPS:
            yield from self._of_few_groups(count)
            return
        front = self._best(count + 1)
        for plain in front[count:]:
            yield plain[-1]
        if len(front) < self._length:
            for plain in islice(_merged(self._groups.values()), len(front), None):
                yield plain[-1]

    def _of_few_groups(self, count: int) -> Iterator[Key]:
        """All but the best `count`, in order."""
        for _, standing in groupby(sorted(self._groups, key=_standing), _standing):
            names = [name for name in standing if name in self._groups]  # one may have gone meanwhile
            groups = [self._groups[name] for name in names]
            length = sum(map(len, groups))
            if count >= length:
                count -= length
                continue
            if len(names) == 1:
                yield from groups[0].beyond(count)
            elif length > FEW:
                yield from islice(merge(*groups, key=CLAIM), count, None)
            else:
                claims = self._equal.get(equal := frozenset(names))
                if claims is None:
                    claims = self._equal[equal] = sorted((CLAIM(key), key) for group in groups for key in group)
                yield from [key for _, key in islice(claims, count, None)]
            count = 0

    def before(self, key: Key) -> int:
        """How many go before `key`."""
        return sum(group.before(key) for group in self._groups.values())

    def __iter__(self) -> Iterator[Key]:
        return self.beyond(0)

    def __reversed__(self) -> Iterator[Key]:
        if len(self._groups) == 1:
            yield from reversed(next(iter(self._groups.values())))
        elif self._length <= FEW and len(self._groups) > FEW_GROUPS:
            for plain in reversed(self._best(self._length)):
                yield plain[-1]
        else:
            yield from merge(*map(reversed, self._groups.values()), reverse=True)

    def __len__(self) -> int:
        return self._length


def in_order(keys: list[Key]) -> list[Key]:
    """Sorted. Where there are several flows, plain numbers are compared: a flow's own comparison is slow."""
    return sorted(keys, key=_plain if len({key[2] for key in keys}) > 1 else None)


def merged(rankings: Iterable[Iterable[Key]]) -> Iterator[Key]:
    """Several that are in order, in one order."""
    return map(itemgetter(-1), _merged(rankings))


def _merged(groups: Iterable[Iterable[Key]]) -> Iterator[Key]:
    """Plain, in one order: that of classes and flows as they stand now."""
    return merge(*(map(_plain, group) for group in groups))


def _plain(key: Key) -> Key:
    """What `key` is compared by, in numbers, and the key."""
    return (key[0], not key[1].due, key[1].klass, key[2].grain, key[3:], key)


def _standing(name: Key) -> Key:
    """Where a group stands among the others, in numbers."""
    return (name[0], not name[1].due, name[1].klass, name[2].grain)
