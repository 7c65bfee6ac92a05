"""What an id is, and which submissions of one are the same request: gateway and scheduler must agree. No service lives
here."""

import re

from protos.v1 import gateway_link_pb2

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
ID_RULE = "must have 1 to 128 characters: letters, digits and . _ : -"


def content(submit: gateway_link_pb2.Submit) -> bytes:
    """All of it but the deadline, which counts from each attempt."""
    same = gateway_link_pb2.Submit()
    same.CopyFrom(submit)
    same.ClearField("deadline_unix_ms")
    return same.SerializeToString(deterministic=True)
