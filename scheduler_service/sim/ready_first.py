"""Which request goes first while the drafts of another are still on their way from elsewhere. Nothing is drafted here.

The rule: of the requests that would run, best first, one whose drafts are due within a pass lets the next one that is
ready go in its place; but never twice running, and only where its Run says that it may. Without others nothing changes.
The same class as worker_service/engine/ready_first.py, which no service may import; a test holds them together.
"""

from collections.abc import Container, Iterable, Mapping, Sequence


class ReadyFirst:
    """Remembers from one step to the next who was passed over and who ran."""

    def __init__(self) -> None:
        self._yielded: set[str] = set()
        self._ran: set[str] = set()
        self._late: Mapping[str, bool] = {}

    def order(self, listed: Sequence[str], slots: int, yields: Container[str], late: Mapping[str, bool]) -> list[str]:
        """The ids of `listed`, best first, in the order in which they are to be tried. `yields`: those that may let
        others go first; `late`: those whose drafts are not here, True: they are due within a pass."""
        self._late = late
        first, spare = list(listed[:slots]), list(listed[slots:])
        passed = [id for id in first if late.get(id) and id in yields and id not in self._yielded]
        ready = [id for id in spare if id not in late][: len(passed)]
        passed = passed[: len(ready)]
        self._yielded = set(passed)
        kept = [id for id in first if id not in self._yielded]
        return [*kept, *ready, *passed, *(id for id in spare if id not in ready)]

    def ran(self, ids: Iterable[str], listed: Iterable[str]) -> list[str]:
        """These do run. Returns who of `listed` only waits for drafts: it was passed over, or ran before."""
        before, self._ran = self._ran, set(ids)
        self._yielded -= self._ran  # one that was to go in its place had no memory
        waits = [id for id in listed if id not in self._ran and (id in self._yielded or id in before)]
        return [id for id in waits if id in self._late]
