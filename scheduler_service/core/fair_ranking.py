"""Requests of several classes and flows in one order, though these change places. No account lives here.

A key holds the class and the flow as such, and compares as they stand now. So the keys of each flow are a ranking
of their own, a group, which nobody else's virtual time can put out of order. Where groups are few they follow one
another as they stand, and those that stand equal are merged. Else the order of all is kept beside them: whole where
keys are few, else its front, as far as it was asked for (front.py).
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence
from heapq import merge
from itertools import groupby, islice
from operator import itemgetter

from scheduler_service.core.front import FEW, Front, merged
from scheduler_service.core.ranking import Changes, Key, Ranking

GROUP = slice(0, 3)  # of a key: whether those that have begun go before it, class and flow
CLAIM = itemgetter(slice(3, None))  # of a key: all that is compared within a group
FEW_GROUPS = 4


class FairRanking:
    """`changes`: those of the classes and flows."""

    __slots__ = ("_changes", "_equals", "_front", "_groups", "_length", "_moves")

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._moves = 0
        self._groups: dict[Key, Ranking] = {}  # none is empty
        self._length = 0
        self._equals = Equals()  # of few groups
        self._front = Front(self._groups, changes)  # of more

    # ---- changes ----

    def add(self, key: Key) -> None:
        name = key[GROUP]
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Ranking()
            self._equals.forget()
        group.add(key)
        self._length += 1
        if self._length > FEW:
            self._equals.forget()
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
                self._front.forget()
            self._equals.forget()
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
        self._moves += 1
        self._equals.changed(name, old, new)
        self._front.changed(name, old, new)

    # ---- the order ----

    @property
    def version(self) -> tuple[int, int]:
        """Another one whenever the order may be another one."""
        return self._moves, self._changes.count if len(self._groups) > 1 else 0

    @property
    def groups(self) -> Collection[Key]:
        """The name of each, which ends with class and flow."""
        return self._groups.keys()

    def at(self, place: int) -> Key | None:
        """The key that so many others go before; None if there are not as many."""
        if place >= self._length:
            return None
        if len(self._groups) == 1:
            return next(iter(self._groups.values())).at(place)
        if len(self._groups) <= FEW_GROUPS:
            return next(self._of_few_groups(place), None)
        front = self._front.best(place + 1, self._length)
        return front[place][-1] if place < len(front) else None

    def first(self, count: int) -> list[Key]:
        """The best `count`, or all if there are fewer."""
        if not self._groups:
            return []
        if len(self._groups) == 1:
            return next(iter(self._groups.values())).first(count)
        if len(self._groups) <= FEW_GROUPS:
            return list(islice(self._of_few_groups(0), count))
        return [plain[-1] for plain in self._front.best(count, self._length)[:count]]

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
        front = self._front.best(count + 1, self._length)
        for plain in front[count:]:  # mostly only the first ones are wanted
            yield plain[-1]
        if len(front) < self._length:
            yield from islice(merged(self._groups.values()), len(front), None)

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
                yield from self._equals.beyond(count, names, groups)
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
            for plain in reversed(self._front.best(self._length, self._length)):
                yield plain[-1]
        else:
            yield from merge(*map(reversed, self._groups.values()), reverse=True)

    def __len__(self) -> int:
        return self._length


class Equals:
    """Groups that stood equal at some time: the claims of all their keys, in order, with the keys."""

    __slots__ = ("_claims",)

    def __init__(self) -> None:
        self._claims: dict[frozenset[Key], list[tuple[Key, Key]]] = {}

    def beyond(self, count: int, names: Sequence[Key], groups: Sequence[Ranking]) -> list[Key]:
        """All keys of these groups but the best `count`, in order."""
        claims = self._claims.get(equal := frozenset(names))
        if claims is None:
            claims = self._claims[equal] = sorted((CLAIM(key), key) for group in groups for key in group)
        return [key for _, key in islice(claims, count, None)]

    def changed(self, name: Key, old: Key | None, new: Key | None) -> None:
        """In the group of that name `new` was added (`old` None), `old` removed (`new` None), or replaced by `new`."""
        for names, claims in self._claims.items():
            if name in names:
                if old is not None:
                    del claims[bisect_left(claims, (CLAIM(old),))]
                if new is not None:
                    insort(claims, (CLAIM(new), new))

    def forget(self) -> None:
        """Keep no order any more: groups have come or gone, or there are too many keys."""
        self._claims.clear()


def _standing(name: Key) -> Key:
    """Where a group stands among the others, in numbers."""
    return (name[0], not name[1].due, name[1].klass, name[2].grain)
