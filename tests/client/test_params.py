"""What the client refuses before anything is sent, and what it sends."""

from typing import Any

import pytest

from laps_sd.client import BadInput, Client, Params
from laps_sd.client.params import INPUTS, STRUCTURES, generate_request
from protos.v1 import inference_pb2, types_pb2


def message(prompt: str | None = "a", **params: Any) -> inference_pb2.GenerateRequest:
    return generate_request("generate", prompt, params)


def test_every_field_of_the_interface_is_a_parameter() -> None:
    fields = set(inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name) - {"chat", "structure"}
    kinds = set(types_pb2.Structure.DESCRIPTOR.fields_by_name)
    assert fields | {"messages"} | kinds == set(Params.__annotations__) | {"prompt"}
    assert kinds == set(STRUCTURES)


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"temperature": "hot"}, "temperature: must be a number, not 'hot'"),
        ({"temperature": True}, "temperature: must be a number, not True"),
        ({"max_tokens": 2.5}, "max_tokens: must be a whole number, not 2.5"),
        ({"max_tokens": -1}, "max_tokens: must be from 0 to 4294967295, not -1"),
        ({"ignore_eos": 1}, "ignore_eos: must be True or False, not 1"),
        ({"stop": "END"}, "stop: must be a list, not 'END'"),
        ({"stop": [7]}, "stop: must be text, not 7"),
        ({"stop": ["\udcff"]}, "stop: is no Unicode text"),
        ({"priority": "high"}, "priority: must be one of interactive, default, batch, not 'high'"),
        ({"on_disconnect": 2}, "on_disconnect: must be one of cancel, detach, not 2"),
        ({"logit_bias": [1]}, "logit_bias: must be a mapping"),
        ({"logit_bias": {"a": 1}}, "logit_bias: must be a whole number, not 'a'"),
        ({"request_id": 5}, "request_id: must be text, not 5"),
        ({"json_schema": {"a": {1}}}, "json_schema: is no JSON"),
        ({"json_schema": 5}, "json_schema: must be a JSON schema"),
        ({"choice": "yes"}, "choice: must be a list"),
        ({"regex": "a", "lark": "b"}, "regex and lark: give one of them at most"),
    ],
)
def test_a_wrong_value_is_a_sentence_that_names_the_field(params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput) as refused:
        message(**params)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        (None, {}, "prompt and messages and tokens"),
        ("x", {"messages": []}, "prompt and messages"),
        (None, {"messages": [], "tokens": [1]}, "messages and tokens"),
    ],
)
def test_exactly_one_input_is_taken(prompt: str | None, params: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInput, match=f"{named}: give one of {INPUTS[0]}"):
        message(prompt, **params)


def test_a_misspelt_parameter_is_named_with_the_one_that_was_meant() -> None:
    client = Client("127.0.0.1:1")
    with pytest.raises(TypeError, match=r"complete\(\) got an unexpected keyword argument 'max_tokenz'.*'max_tokens'"):
        client.complete("x", max_tokenz=5)  # type: ignore[call-arg]


def test_a_message_of_a_chat_has_a_role_and_a_content() -> None:
    with pytest.raises(BadInput, match=r"messages\[1\]"):
        message(None, messages=[{"role": "user", "content": "a"}, {"role": "user", "contents": "a"}])


def test_what_is_left_out_or_none_is_not_sent() -> None:
    assert message(temperature=None, stop=None, json_object=False) == inference_pb2.GenerateRequest(prompt="a")


def test_inputs_and_structures_become_their_fields() -> None:
    assert list(message(None, tokens=(5, 7)).tokens.ids) == [5, 7]
    assert message(json_schema={"type": "object"}).structure.json_schema == '{"type": "object"}'
    assert message(json_object=True).structure.json_object
    assert list(message(choice=["yes", "no"]).structure.choice.texts) == ["yes", "no"]
    assert message(priority="batch").priority == types_pb2.PRIORITY_BATCH
    assert dict(message(logit_bias={5: -1}).logit_bias) == {5: -1.0}
