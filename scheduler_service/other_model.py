"""Keeps a live request from being continued by another model than it was submitted for: its prompt is token ids of that
model's tokenizer, and its output would change in the middle. Such a request ends with an error."""

import asyncio
from collections.abc import Callable

AT_ONCE = 32  # requests checked before others get a turn of the event loop


class OtherModel:
    """`fail` ends a live request, with a message for its client. `models`: the fingerprints of the live requests, by
    id. "" is a request that was stored before fingerprints were: any model may run it."""

    def __init__(self, fail: Callable[[str, str], None], models: Callable[[], dict[str, str]]) -> None:
        self._fail, self._models = fail, models
        self._unchecked: dict[str, str] = {}  # since the model has changed
        self._served = ""  # fingerprint of the model that the workers run; "": no worker has come yet

    def restored(self, id: str, fingerprint: str) -> None:
        """A live request was read back."""
        if self._served:
            self._check(id, fingerprint)

    async def serve(self, fingerprint: str) -> None:
        """Workers run this model from now on. On return no request of another model is live. One call at a time: one
        that was cancelled is completed by the next."""
        if fingerprint != self._served:
            self._served, self._unchecked = fingerprint, self._models()
        while self._unchecked:
            self._check(*self._unchecked.popitem())
            if len(self._unchecked) % AT_ONCE == 0:
                await asyncio.sleep(0)

    def _check(self, id: str, fingerprint: str) -> None:
        if fingerprint not in ("", self._served):
            self._fail(id, f"it was submitted for model {fingerprint}; the workers now run model {self._served}")
