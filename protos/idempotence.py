"""Which submissions of one id are the same request. Gateway and scheduler must agree on that; no service lives here."""

from protos.v1 import gateway_link_pb2


def content(submit: gateway_link_pb2.Submit) -> bytes:
    """All of it but the deadline, which counts from each attempt."""
    same = gateway_link_pb2.Submit()
    same.CopyFrom(submit)
    same.ClearField("deadline_unix_ms")
    return same.SerializeToString(deterministic=True)
