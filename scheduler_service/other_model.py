"""Keeps a stored request from being continued by another model than it was submitted for: its prompt is token ids of
that model's tokenizer, and its output would change in the middle. Such a request ends with an error."""

import asyncio
from collections.abc import Callable

AT_ONCE = 32  # requests ended before others get a turn of the event loop


class OtherModel:
    """`fail` ends a live request, with a message for its client."""

    def __init__(self, fail: Callable[[str, str], None]) -> None:
        self._fail = fail
        self._unchecked: dict[str, str] = {}  # fingerprints of restored requests, by id, until a worker has come
        self._served = ""  # fingerprint of the model that the workers run; "": no worker has come yet

    def restored(self, id: str, fingerprint: str) -> None:
        """A live request was read back. `fingerprint` "": it was stored before fingerprints were; any model may run
        it."""
        if fingerprint:
            self._unchecked[id] = fingerprint
            if self._served:
                self._check(id)

    async def serve(self, fingerprint: str) -> None:
        """Workers run this model; later calls change nothing. On return no request of another model is live."""
        self._served = self._served or fingerprint
        for count, id in enumerate(list(self._unchecked), 1):
            if id in self._unchecked:  # else another worker's call has checked it
                self._check(id)
            if count % AT_ONCE == 0:
                await asyncio.sleep(0)

    def _check(self, id: str) -> None:
        fingerprint = self._unchecked.pop(id)
        if fingerprint != self._served:
            self._fail(id, f"it was submitted for model {fingerprint}; the workers now run model {self._served}")
