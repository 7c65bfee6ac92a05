"""Workers in the order of their vacant slots. Only the fleet's state lives here; it decides nothing."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler_service.core.ranking import Key


class Vacancies:
    """How many slots each worker's own requests leave free; negative where some of them wait."""

    def __init__(self) -> None:
        self._order: list[Key] = []  # most vacant slots first, then as the workers came
        self._keys: dict[str, Key] = {}
        self._came = 0

    def set(self, name: str, vacancy: int) -> None:
        """The worker has as many from now on."""
        if name in self._keys:
            key = self._keys[name]
            if key[0] == -vacancy:
                return
            del self._order[bisect_left(self._order, key)]
            came = key[1]
        else:
            came = self._came = self._came + 1
        key = self._keys[name] = (-vacancy, came, name)
        insort(self._order, key)

    def remove(self, name: str) -> None:
        """The worker has gone. Raises KeyError."""
        del self._order[bisect_left(self._order, self._keys.pop(name))]

    @property
    def waiting(self) -> bool:
        """Whether a worker has more requests than slots."""
        return bool(self._order) and self._order[-1][0] > 0

    def most(self) -> Iterator[str]:
        """All workers, the one with most vacant slots first."""
        return (key[2] for key in self._order)

    def short(self) -> list[str]:
        """Workers that have more requests than slots."""
        return [key[2] for key in self._order[bisect_left(self._order, (1,)) :]]
