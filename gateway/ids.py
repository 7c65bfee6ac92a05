"""Ids of requests that a caller names: whether one may be an id, and whether the caller may hear of that request."""

from gateway.access import caller
from protos.errors import BadInput, UnknownRequest
from protos.idempotence import REQUEST_ID


def required_id(request_id: str) -> str:
    """Raises BadInput, UnknownRequest."""
    if not request_id:
        raise BadInput("request_id", "missing")
    if not REQUEST_ID.fullmatch(request_id):
        raise UnknownRequest("request_id: unknown")
    return request_id


def owned(request_id: str, tenant: str) -> None:
    """Raises UnknownRequest for a request of another tenant: the caller must not learn that it exists."""
    if not caller.get().may_see(tenant):
        raise UnknownRequest(f"request {request_id} is unknown, or ended too long ago")
