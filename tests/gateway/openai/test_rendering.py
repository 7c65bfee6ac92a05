"""How a client has the model's chat template rendered: `chat_template_kwargs` and what goes with it, by every door that
renders one. What a template makes of it is in tests/gateway/test_text.py."""

import asyncio
import json
from typing import Any

import grpc
import pytest

from protos.v1 import inference_pb2, inference_pb2_grpc
from tests.gateway.harness import TOKENIZER, WAIT_S, ids
from tests.gateway.openai.harness import CHAT, COMPLETION, door
from tests.gateway.openai.test_tools import WEATHER
from tests.waiting import until

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if not enable_thinking | default(true) %} <none>{% endif %}{% endif %}"
)
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
TEXT = "user: the fox\nassistant: <none>"
PATHS = {"/v1/chat/completions": CHAT, "/v1/responses": {"model": "tiny", "input": "the fox"}, "/tokenize": CHAT}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_variable_of_the_template_reaches_the_prompt(path: str) -> None:
    async with door(template=TEMPLATE) as at:
        task = at.asked(PATHS[path] | QUIET, path)
        submit = await at.link.accept()
        assert list(submit.prompt) == ids(TEXT)
        await at.say(submit, "a")
        assert (await asyncio.wait_for(task, WAIT_S)).status_code == 200


async def test_tokenize_renders_what_a_chat_does() -> None:
    async with door(template=TEMPLATE, context_tokens=2048) as at:
        for fields, text in (
            (QUIET, TEXT),
            ({"add_generation_prompt": False}, "user: the fox\n"),
            ({"continue_final_message": True}, "user: the fox"),
        ):
            said = (await at.http.post("/tokenize", json=CHAT | fields)).json()
            assert (said["tokens"], said["count"]) == (ids(text), len(ids(text)))
        tools = {"tools": [WEATHER]}
        asked = at.asked(CHAT | tools)
        submit = await at.link.accept()
        assert (await at.http.post("/tokenize", json=CHAT | tools)).json()["tokens"] == list(submit.prompt)
        await at.say(submit, "a")
        await asyncio.wait_for(asked, WAIT_S)


async def test_tokenize_tells_tokens_as_text_and_leaves_special_ones_out_if_asked() -> None:
    async with door() as at:
        asked = COMPLETION | {"add_special_tokens": False, "return_token_strs": True}
        said = (await at.http.post("/tokenize", json=asked)).json()
        assert said["tokens"] == ids("the fox")
        assert said["token_strs"] == [TOKENIZER.id_to_token(token) for token in said["tokens"]]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
        ({"chat_template_kwargs": {"tools": [], "bos_token": ""}}, "chat_template_kwargs", "invalid_value"),
        ({"chat_template_kwargs": {"a": "x" * 8192}}, "chat_template_kwargs", "invalid_value"),
        ({"chat_template_kwargs": "a"}, "chat_template_kwargs", "invalid_value"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "invalid_value"),
        ({"add_generation_prompt": 1}, "add_generation_prompt", "invalid_value"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "invalid_value",
        ),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_parameter"),
        ({"documents": [{"text": "a"}]}, "documents", "unsupported_parameter"),
    ],
)
async def test_what_a_client_may_not_render_is_named(path: str, fields: dict[str, Any], param: str, code: str) -> None:
    async with door(template=TEMPLATE) as at:
        error = await at.refused(PATHS[path] | fields, path)
        assert (error["status"], error["param"], error["code"]) == (400, param, code), error
        assert len(error["message"]) < 300


async def test_variables_nested_too_deep_are_refused() -> None:
    async with door(template=TEMPLATE) as at:
        for depth, status in ((100, 200), (1000, 400)):
            nested = b'{"a":' * depth + b"1" + b"}" * depth
            raw = json.dumps(CHAT).encode()[:-1] + b', "chat_template_kwargs": ' + nested + b"}"
            assert (await at.http.post("/tokenize", content=raw)).status_code == status


async def test_the_same_request_sent_again_is_the_same_and_with_other_variables_it_is_not() -> None:
    async with door(template=TEMPLATE) as at:
        body = CHAT | QUIET | {"request_id": "r"}
        first = at.asked(body)
        submit = await at.link.accept()
        other = await at.http.post("/v1/chat/completions", json=CHAT | {"request_id": "r"})
        assert other.status_code == 409
        again = at.asked(body)
        (link,) = at.gateway.front._cells.links.values()

        async def both() -> bool:
            return len(link.feeds["r"]) == 2

        await until(both)
        await at.say(submit, "jumps")
        texts = [
            (await asyncio.wait_for(task, WAIT_S)).json()["choices"][0]["message"]["content"] for task in (first, again)
        ]
        assert texts == ["jumps", "jumps"]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"template_kwargs": "["}, "must be a JSON object"),
        ({"template_kwargs": "[]"}, "must be a JSON object"),
        ({"template_kwargs": '{"a": NaN}'}, "must be a JSON object"),
        ({"template_kwargs": "[" * 8000}, "must be a JSON object"),
        ({"template_kwargs": json.dumps({"messages": 1})}, "the service itself sets messages"),
        ({"template_kwargs": " " * 8193}, "more than 8192 bytes"),
    ],
)
async def test_grpc_takes_them_as_json(fields: dict[str, Any], problem: str) -> None:
    async with door(template=TEMPLATE) as at, grpc.aio.insecure_channel(at.gateway.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "the fox"}], **fields}
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Generate(inference_pb2.GenerateRequest(chat=chat), timeout=WAIT_S).read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.value.details() == f"chat.template_kwargs: {problem}"
