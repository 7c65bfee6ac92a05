"""Submissions that wait for the scheduler's answer. An answer names its request by the id alone, so it must not come
after another request has taken the id. Nothing is sent here."""

from protos.errors import DuplicateRequest, NotServing
from protos.link.v1 import gateway_link_pb2

RETRY_AFTER_MS = 100


class Unanswered:
    """Ids of the submissions that wait, on one connection to the scheduler."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def clear(self) -> None:
        """The connection is new."""
        self._ids.clear()

    def sends(self, message: gateway_link_pb2.FromGateway) -> bool:
        """Whether the message is to be sent. A submission is not if one of the same id waits: that one's answer goes to
        all streams of the request, and the answer to a second submission could come late."""
        if not message.HasField("submit"):
            return True
        waits = message.submit.request_id in self._ids
        self._ids.add(message.submit.request_id)
        return not waits

    def heard(self, request_id: str) -> None:
        """The request was accepted or refused, and its streams were told."""
        self._ids.discard(request_id)

    def check(self, request_id: str) -> None:
        """Raises NotServing if the answer to an earlier request of this id would be taken for a new one's."""
        if request_id in self._ids:
            raise NotServing("an earlier request of this id is not answered yet", retry_after_ms=RETRY_AFTER_MS)


def taken(request_id: str) -> DuplicateRequest:
    return DuplicateRequest(f"request_id: {request_id} is taken by another request")
