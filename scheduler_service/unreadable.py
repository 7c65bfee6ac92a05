"""Stored requests that cannot be read: found here, and kept apart in the store, so that none of them ends the service.
What the store itself can check of a request, it checks (store/fields.py)."""

from typing import TypeAlias

import structlog
from google.protobuf.message import DecodeError

from protos.errors import Lost
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as pb
from scheduler_service.store import Store, Stored, StoreRefuses, Unreadable
from scheduler_service.store.rounds import logprobs

Found: TypeAlias = Stored | Unreadable | None  # None: it is not stored, or no longer


def checked(id: str, found: Found) -> Found:
    """`found`, or why what is stored of it is of no use, though the store itself could read it."""
    if not isinstance(found, Stored):
        return found
    try:
        submit = pb.Submit.FromString(found.submit)
        pb.Ending.FromString(found.ending or b"")
        for told in logprobs(found.log):
            common_pb.Logprobs.FromString(told)
    except DecodeError as error:
        return Unreadable(f"its payload is malformed: {error}")
    stored, payload = (id, found.record.request.prompt_tokens), (submit.request_id, len(submit.prompt))
    if stored != payload:
        return Unreadable(f"its payload does not belong to it: id and prompt tokens are {payload}, not {stored}")
    return found


def lost(id: str, unreadable: Unreadable) -> Lost:
    """What the client of such a request is told."""
    return Lost(f"request {id} cannot be continued, what is stored of it cannot be read: {unreadable.reason}")


class SetAside:
    """Unreadable requests on their way to where the store keeps them apart."""

    def __init__(self, store: Store) -> None:
        self.count = 0  # found since this leader began
        self._store = store
        self.pending: dict[str, str] = {}  # reasons, by id
        self._log = structlog.get_logger()

    def found(self, id: str, unreadable: Unreadable) -> None:
        self.count += 1
        self.pending[id] = unreadable.reason
        self._log.error("request_unreadable", request_id=id, reason=unreadable.reason)

    async def carry_out(self, epoch: int) -> None:
        """Raises StoreUnavailable, and may then be called again; Fenced. A request that the store refuses to set aside
        stays where it is: the next leader finds it again."""
        while self.pending:
            id, reason = next(iter(self.pending.items()))
            try:
                await self._store.set_aside(epoch, id, reason)
            except StoreRefuses as error:
                self._log.error("not_set_aside", request_id=id, reason=str(error))
            self.pending.pop(id, None)
