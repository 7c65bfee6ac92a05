"""Sizes of a body that has many answers are checked once, before anything is copied for each."""

import json
from typing import Any

import pytest

from gateway.openai import request
from gateway.openai.fields import Completion
from gateway.openai.parse import parse
from gateway.structure import MAX_BYTES
from gateway.validate import MAX_BIASES, MAX_STOPS
from protos.errors import BadInput
from tests.gateway.harness import CONTEXT_TOKENS
from tests.gateway.openai.harness import COMPLETION


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {str(token): 1 for token in range(MAX_BIASES + 1)}),
        ("stop", ["a"] * (MAX_STOPS + 1)),
        ("structured_outputs", {"regex": "a" * MAX_BYTES}),
        ("prompt", [7] * CONTEXT_TOKENS),
    ],
)
def test_a_field_too_large_is_refused_before_it_is_copied_for_every_answer(field: str, value: Any) -> None:
    body = parse(Completion, json.dumps(COMPLETION | {"n": 16, field: value}).encode())
    with pytest.raises(BadInput) as error:
        request.of_completion(body, "r", CONTEXT_TOKENS)
    assert error.value.field == field
