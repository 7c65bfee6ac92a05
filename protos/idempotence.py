"""What an id is, and which submissions with the same id are the same request: gateway and scheduler must agree. No
service lives here."""

import re
from typing import Literal, TypeAlias

from protos.link.v1.gateway_link_pb2 import Submit

MOST_ID_CHARS = 128
REQUEST_ID = re.compile(rf"[A-Za-z0-9._:-]{{1,{MOST_ID_CHARS}}}")
ID_RULE = f"must have 1 to {MOST_ID_CHARS} characters: letters, digits and . _ : -"
Field: TypeAlias = Literal["timeout_s", "model_fingerprint", "prompt", "input_digest", "traceparent"]
OF_AN_ATTEMPT: tuple[Field, ...] = ("timeout_s", "model_fingerprint")


def content(submit: Submit) -> bytes:
    """What the store keeps: everything but the time until the deadline, which is another for each attempt, and the
    model, which it keeps beside it."""
    return _without(submit, *OF_AN_ATTEMPT).SerializeToString(deterministic=True)


def same(one: Submit, other: Submit) -> bool:
    """Whether two submissions with the same id are the same request: equal but for what belongs to an attempt, and the
    trace that it is a part of, which is stored.

    Where both carry a digest of what the client sent, the digests are compared and the tokens are not: a chat template
    may write today's date into them, and a request that is sent again after midnight is still the same.
    """
    unlike: Field = "prompt" if one.input_digest and other.input_digest else "input_digest"
    unlikes = (*OF_AN_ATTEMPT, "traceparent", unlike)
    return _without(one, *unlikes) == _without(other, *unlikes)


def _without(submit: Submit, *fields: Field) -> Submit:
    copy = Submit()
    copy.CopyFrom(submit)
    for field in fields:
        copy.ClearField(field)
    return copy
