"""Which submissions with the same id are the same request."""

import pytest

from protos.idempotence import content, same
from protos.link.v1.common_pb2 import Limits
from protos.link.v1.gateway_link_pb2 import Submit


def submit(**fields: object) -> Submit:
    return Submit(**{"request_id": "r", "prompt": [1, 2], "input_digest": b"a", "timeout_s": 2.0} | fields)  # type: ignore[arg-type]


def test_each_attempt_has_its_own_deadline() -> None:
    assert same(submit(timeout_s=2.0), submit(timeout_s=1.5))
    assert content(submit(timeout_s=2.0)) == content(submit(timeout_s=1.5))


def test_the_same_input_is_the_same_request_though_its_template_writes_another_date_into_it() -> None:
    assert same(submit(prompt=[1, 2]), submit(prompt=[1, 3]))


def test_another_input_is_another_request_though_its_tokens_are_the_same() -> None:
    assert not same(submit(input_digest=b"a"), submit(input_digest=b"b"))


@pytest.mark.parametrize("other", [{"tenant": "else"}, {"limits": Limits(max_tokens=9)}, {"predicted_tokens": 4}])
def test_everything_else_must_be_equal(other: dict[str, object]) -> None:
    assert not same(submit(), submit(**other))
