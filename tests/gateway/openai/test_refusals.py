"""What is wrong with a body is a 400 that names the field; nothing that is sent makes a 500."""

import json
import threading
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.openai import routes
from gateway.openai.fields import Body, Chat, Completion, Detokenize, Tokenize
from gateway.openai.parse import parse
from gateway.openai.response_fields import Responses
from gateway.validate import MAX_MESSAGES
from tests.gateway.openai.harness import CHAT, COMPLETION, HELLO, door

RESPONSE = {"model": "tiny", "input": "the fox"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

# A field of a chat, its value, and the param of the error where it is another name.
BAD: list[tuple[str, Any] | tuple[str, Any, str]] = [
    ("messages", []),
    ("messages", "hi"),
    ("messages", [7], "messages[0]"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
    ("messages", [{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
    ("messages", [{"role": "nobody", "content": "a"}], "messages[0].role"),
    ("messages", [*HELLO, {"role": "system", "content": "late"}]),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 10**400),
    ("max_tokens", 1.5),
    ("max_tokens", "5"),
    ("max_tokens", True),
    ("max_completion_tokens", 0),
    ("temperature", -1),
    ("temperature", 3),
    ("temperature", "hot"),
    ("temperature", 1e300),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_k", -2),
    ("top_k", 10**9),
    ("presence_penalty", 9),
    ("repetition_penalty", 0),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"99999": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": "x"}),
    ("logit_bias", []),
    ("stop", 5),
    ("stop", ["a"] * 9),
    ("stop", [""]),
    ("stop", ["a", 1], "stop[1]"),
    ("seed", 2**63),
    ("seed", 0.5),
    ("n", 0),
    ("n", 17),
    ("n", "2"),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("logprobs", 3),
    ("top_logprobs", 2),
    ("predicted_tokens", 0),
    ("class", "urgent"),
    ("timeout_s", 0),
    ("timeout_s", -1),
    ("on_disconnect", "explode"),
    ("request_id", "a b"),
    ("request_id", ""),
    ("model", 5),
    ("response_format", "json"),
    ("response_format", {}, "response_format.type"),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": []}}, "response_format.json_schema.schema"),
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ("structured_outputs", {"choice": [1]}, "structured_outputs.choice[0]"),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}),
    ("structured_outputs", {"regex": "("}),
    ("structured_outputs", {"grammar": "start: nothing"}),
    ("structured_outputs", {"choice": []}),
    ("tool_choice", "required"),
    ("tools", [{"type": "function"}], "tools[0].function"),
    ("tools", [{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
]
UNSUPPORTED: list[tuple[str, Any] | tuple[str, Any, str]] = [
    ("audio", {}),
    ("best_of", 2),
    ("function_call", "auto"),
    ("functions", [{}]),
    ("guided_json", {}),
    ("messages", [{"role": "function", "content": "a", "name": "b"}], "messages[0].role"),
    ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
    ("lora_name", "my-adapter"),
    ("lora_path", "my-adapter"),
    ("min_p", 0.1),
    ("modalities", ["text", "audio"]),
    ("prediction", {}),
    ("priority", 1),
    ("response_format", {"type": "structural_tag"}),
    ("structured_outputs", {"structural_tag": "x"}),
    ("suffix", "x"),
    ("web_search_options", {}),
]


async def test_a_bad_field_is_named() -> None:
    async with door() as at:
        for field, value, *param in BAD:
            error = await at.refused(CHAT | {field: value})
            told = (error["status"], error["type"], error["param"], error["code"])
            assert told == (400, "invalid_request_error", (param or [field])[0], "invalid_value"), (field, value, error)
            assert error["message"].startswith(f"{told[2]}: ")
        assert at.link.received.empty()


async def test_what_would_change_the_answer_and_is_not_there_is_refused() -> None:
    async with door() as at:
        for field, value, *param in UNSUPPORTED:
            error = await at.refused(CHAT | {field: value})
            told = (error["status"], error["param"], error["code"])
            assert told == (400, (param or [field])[0], "unsupported_parameter"), (field, value, error)
        assert at.link.received.empty()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize("field", ["adapter_id", "lora_name", "lora_path", "lora_request", "truncate_prompt_tokens"])
async def test_no_endpoint_overlooks_an_adapter_or_a_cut_prompt(path: str, field: str) -> None:
    prompt = "prompt" if path == "/tokenize" else "input"
    async with door() as at:
        error = await at.refused({"model": "tiny", prompt: "the fox", field: "own"}, path)
        assert (error["status"], error["param"], error["code"]) == (400, field, "unsupported_parameter")
        assert at.link.received.empty()


async def test_more_of_a_prompt_than_is_told_is_refused_in_the_names_of_the_door() -> None:
    scored = {"echo": True, "logprobs": 20}
    wrong: list[tuple[dict[str, Any], str]] = [
        (scored | {"logprobs": 21}, "logprobs: "),
        (scored | {"prompt": [5] * 1600}, "logprobs: 1600 tokens, 21 values each; at most 32768 values in all"),
        ({"prompt": [5] * 1600, "prompt_logprobs": 20}, "prompt_logprobs: 1600 tokens"),
        (scored | {"prompt_logprobs": 1}, "prompt_logprobs: not with echo"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: "),
        ({"echo": True, "max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"logprobs": 1, "max_tokens": 0}, "max_tokens: must be at least 1"),
        (scored | {"max_tokens": 0, "min_tokens": 1}, "min_tokens: 1 exceeds max_tokens 0"),
    ]
    async with door(context_tokens=4096) as at:
        for fields, problem in wrong:
            error = await at.refused(COMPLETION | fields, "/v1/completions")
            assert (error["status"], error["message"].startswith(problem)) == (400, True), error
        assert at.link.received.empty()


async def test_an_engine_that_cannot_score_prompts_refuses_them() -> None:
    async with door(engine={"refused": {"prompt_logprobs": "not here"}}) as at:
        error = await at.refused(COMPLETION | {"echo": True, "logprobs": 1}, "/v1/completions")
        assert (error["param"], error["message"]) == ("logprobs", "logprobs: not here")
        error = await at.refused(CHAT | {"prompt_logprobs": 1})
        assert (error["param"], error["message"]) == ("prompt_logprobs", "prompt_logprobs: not here")


async def test_a_field_of_another_endpoint_is_refused() -> None:
    kept_there = {"previous_response_id": "a", "conversation": "a", "background": True}
    foreign = {
        "/v1/chat/completions": (CHAT, {"prompt": "a", "echo": True, "max_output_tokens": 3, "instructions": "a"}),
        "/v1/completions": (COMPLETION, {"messages": HELLO, "tools": [TOOL], "tool_choice": "required"}),
        "/v1/responses": (RESPONSE, {"max_tokens": 3, "n": 2, "stop": ["a"], "seed": 1, "logprobs": True}),
    }
    foreign["/v1/chat/completions"][1].update(kept_there)
    foreign["/v1/completions"][1].update({"top_logprobs": 2} | kept_there)
    foreign["/v1/responses"][1].update({"priority": 1, "guided_json": {}, "min_p": 0.5, "skip_special_tokens": False})
    async with door() as at:
        for path, (body, fields) in foreign.items():
            for field, value in fields.items():
                error = await at.refused(body | {field: value}, path)
                told = (error["status"], error["param"], error["code"])
                assert told == (400, field, "unsupported_parameter"), (path, field, error)
        assert at.link.received.empty()


async def test_a_refusal_says_what_to_send_instead() -> None:
    async with door() as at:
        for path, body, instead in (
            ("/v1/chat/completions", CHAT | {"functions": [{}]}, "send `tools`"),
            ("/v1/chat/completions", CHAT | {"guided_json": {}, "min_p": 0.5}, "send `structured_outputs`"),
            ("/v1/completions", COMPLETION | {"regex": "a+"}, "send `structured_outputs`"),
            ("/v1/responses", RESPONSE | {"previous_response_id": "a"}, "send the whole conversation"),
            ("/v1/chat/completions", CHAT | {"previous_response_id": "a"}, "send the whole conversation"),
            ("/v1/responses", RESPONSE | {"repeat_penalty": 1.2}, "repeat_penalty: not supported"),
            ("/v1/completions", COMPLETION | {"functions": [{}]}, "functions: not supported"),
            ("/v1/responses", RESPONSE | {"max_tokens": 3}, "send `max_output_tokens`"),
            ("/v1/chat/completions", CHAT | {"max_output_tokens": 3}, "send `max_completion_tokens`"),
            ("/v1/chat/completions", CHAT | {"enable_thinking": False}, "send it in `chat_template_kwargs`"),
            ("/v1/chat/completions", CHAT | {"extra_body": {"top_k": 1}}, "send its fields beside the others"),
            ("/v1/completions", COMPLETION | {"n_predict": 5}, "send `max_tokens`"),
            ("/v1/responses", RESPONSE | {"tools": [TOOL]}, "here a function's fields stand beside its type"),
            (
                "/v1/completions",
                COMPLETION | {"tools": [TOOL]},
                "/v1/chat/completions and /v1/responses call functions",
            ),
        ):
            assert (await at.refused(body, path))["message"].endswith(instead)


async def test_what_asks_for_nothing_is_taken() -> None:
    nothing = {
        "best_of": 1,
        "min_p": 0,
        "store": False,
        "modalities": ["text"],
        "service_tier": "auto",
        "truncation": "disabled",
        "functions": [],
        "tools": [],
        "tool_choice": "auto",
        "logit_bias": {},
        "stop": [],
        "n": 1.0,
        "reasoning_effort": "low",
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
    }
    async with door() as at:
        answer, _ = await at.answered(
            CHAT | nothing | dict.fromkeys(("seed", "stream_options", "guided_json", "top_p"))
        )
        assert answer.status_code == 200
        answer, _ = await at.answered(CHAT | {"best_of": 1, "n": None})
        assert answer.status_code == 200
        foreign = {"tools": [], "tool_choice": "none", "messages": None}
        answer, _ = await at.answered(COMPLETION | foreign, path="/v1/completions")
        assert answer.status_code == 200


async def test_unknown_fields_are_ignored_and_counted() -> None:
    async with door() as at:
        answer, _ = await at.answered(CHAT | {"nobody_knows": 1, "nor_this": {}, "user": "me"})
        assert answer.status_code == 200
        metrics = (await at.http.get("/metrics")).text
        assert 'laps_sd_http_ignored_fields_total{model_name="tiny",path="/v1/chat/completions"} 2.0' in metrics


async def test_a_prompt_beyond_the_context_has_openais_code() -> None:
    async with door() as at:
        for body, param in (
            (CHAT | {"messages": [{"role": "user", "content": "x" * 100}]}, "messages"),
            (CHAT | {"max_tokens": 60}, "max_tokens"),
            (CHAT | {"max_completion_tokens": 60}, "max_completion_tokens"),
        ):
            error = await at.refused(body)
            told = (error["status"], error["param"], error["code"])
            assert told == (400, param, "context_length_exceeded")
        error = await at.refused(COMPLETION | {"prompt": [40] * 99}, "/v1/completions")
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


async def test_messages_of_one_body_are_bounded_before_any_is_read() -> None:
    many = [{"role": "tool", "content": "a"}] * (MAX_MESSAGES + 1)
    async with door() as at:
        for path in ("/v1/chat/completions", "/tokenize"):
            error = await at.refused({"model": "tiny", "messages": many}, path)
            assert (error["status"], error["param"]) == (400, "messages")
        many = [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1)
        error = await at.refused({"model": "tiny", "input": many}, "/v1/responses")
        assert (error["status"], error["param"]) == (400, "input")


async def test_answers_to_one_body_are_bounded() -> None:
    async with door() as at:
        error = await at.refused(COMPLETION | {"prompt": ["a"] * 9, "n": 16}, "/v1/completions")
        assert (error["status"], error["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("body", "param"), [(CHAT | {"n": 3}, "n"), (COMPLETION | {"prompt": ["a", "b", "c"]}, "prompt")]
)
async def test_more_answers_than_the_gateway_ever_makes_at_a_time_are_refused(body: dict[str, Any], param: str) -> None:
    """A 429 would be the answer to every later try, too."""
    async with door(max_requests=2) as at:
        error = await at.refused(body, "/v1/completions" if "prompt" in body else "/v1/chat/completions")
        assert (error["status"], error["param"]) == (400, param)
        assert at.link.received.empty()


async def test_another_model_is_not_found() -> None:
    async with door() as at:
        error = await at.refused(CHAT | {"model": "gpt-4o"})
        assert (error["status"], error["code"]) == (404, "model_not_found")
        error = await at.refused({"messages": HELLO})
        assert (error["status"], error["param"]) == (400, "model")


RAW = [
    b"",
    b"{",
    b"nonsense",
    b"[]",
    b"null",
    b'"a"',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff"}]}',
    b'{"model": "tiny", "temperature": NaN}',
    b'{"model": "tiny", "temperature": -Infinity}',
    b'{"model": "tiny", "seed": ' + b"9" * 5000 + b"}",
    b'{"model": "tiny", "messages": 1e999, "prompt": 1e999, "tokens": 1e999}',
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
async def test_bytes_that_are_no_body_are_400(path: str) -> None:
    async with door() as at:
        for raw in RAW:
            answer = await at.http.post(path, content=raw)
            assert answer.status_code == 400, (raw[:60], answer.text)
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert len(answer.content) < 2000  # whatever was sent, little of it comes back


async def test_a_compressed_body_is_told_so() -> None:
    async with door() as at:
        answer = await at.http.post("/tokenize", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "content-encoding")
        assert error["message"] == "content-encoding: gzip is not read here: send the body as it is"


async def test_a_mark_of_utf8_before_a_body_is_no_part_of_it() -> None:
    async with door() as at:
        answer = await at.http.post("/tokenize", content=b"\xef\xbb\xbf" + json.dumps(COMPLETION).encode())
        assert (answer.status_code, answer.json()["count"] > 0) == (200, True)


async def test_a_long_body_is_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte of JSON would hold the event loop, and so every stream, for tens of milliseconds."""
    threads: list[threading.Thread] = []

    def parsed(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return parse(*arguments)

    monkeypatch.setattr(routes, "parse", parsed)
    async with door() as at:
        for tokens in (10, routes.THREAD_ABOVE_BYTES):
            answer = await at.http.post("/detokenize", json={"model": "tiny", "tokens": [40] * tokens})
            assert answer.status_code == 200
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
    ],
)
async def test_what_the_workers_engine_cannot_do_is_a_400_that_names_the_field(
    fields: dict[str, Any], param: str
) -> None:
    refused = {"logit_bias": "not with this engine", "structure": "not with this engine"}
    async with door(engine={"refused": refused}) as at:
        error = await at.refused(CHAT | fields)
        assert (error["status"], error["param"], error["message"]) == (400, param, f"{param}: not with this engine")
        answer, _ = await at.answered(CHAT | {"logit_bias": {}})
        assert answer.status_code == 200


async def test_the_last_of_two_equal_names_counts() -> None:
    async with door() as at:
        raw = json.dumps(CHAT).encode()[:-1] + b', "model": "other"}'
        answer = await at.http.post("/v1/chat/completions", content=raw)
        assert answer.status_code == 404


async def test_an_id_of_another_request_is_a_conflict_that_is_not_tried_again() -> None:
    async with door() as at:
        task = at.asked(CHAT | {"request_id": "r"})
        submit = await at.link.accept()
        answer = await at.http.post("/v1/chat/completions", json=CHAT | {"request_id": "r", "top_p": 0.5})
        assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")
        await at.say(submit, "a")
        assert (await task).status_code == 200


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Completion, {"prompt": [{}] * 1000}),
        (Completion, {"prompt": [[-1]] * 1000}),
        (Completion, {"prompt": [["a"] * 1000]}),
        (Chat, {"messages": [{}] * 1000}),
        (Chat, {"messages": [{"role": "user", "content": [{}] * 1000}]}),
        (Chat, {"stop": [1] * 1000}),
        (Responses, {"input": [5] * 1000}),
        (Responses, {"input": [{"content": [{}] * 1000}]}),
        (Tokenize, {"messages": [{}] * 1000}),
        (Detokenize, {"tokens": ["a"] * 1000}),
    ],
)
def test_reading_a_list_ends_at_the_first_wrong_entry(kind: type[Body], fields: dict[str, Any]) -> None:
    """A body may hold hundreds of thousands, and every stream waits while one body is read."""
    with pytest.raises(ValidationError) as error:
        kind.model_validate(CHAT | COMPLETION | {"input": "a"} | fields)
    assert error.value.error_count() < 10
