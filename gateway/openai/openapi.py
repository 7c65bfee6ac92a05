"""The OpenAPI document of the HTTP API, made from the table of fields. It is data for people and tools; nothing here
decides how a request is served."""

from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema

from gateway.openai.fields import UINT32, Body, Chat, Completion, Detokenize, Tokenize
from gateway.openai.inputs import Embeddings
from gateway.openai.response_fields import Responses

_REFERENCE = "#/components/schemas/{model}"
_REQUEST_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
ERRORS = {
    "400": "a field is wrong, not supported, or the context too short: error.param names it",
    "401": "no API key, or none that is known",
    "403": "the key lacks the right",
    "404": "no such model, request or path",
    "405": "the path does not take this method: allow",
    "408": "the body was not whole in time",
    "409": "another request has this id",
    "413": "the body is too long",
    "416": "the answer has fewer tokens than the offset",
    "429": "full, or the caller has its share: retry-after, retry-after-ms",
    "499": "the request was cancelled",
    "500": "it could not be run",
    "503": "draining, or no worker: retry-after",
    "504": "the deadline passed",
}
_GENERATING = ("400", "404", "408", "409", "429", "499", "500", "504")
_PATHS: dict[str, dict[str, tuple[str, type[Body] | None, tuple[str, ...]]]] = {
    "/v1/chat/completions": {"post": ("Continue a conversation", Chat, _GENERATING)},
    "/v1/completions": {"post": ("Continue a prompt", Completion, _GENERATING)},
    "/v1/responses": {"post": ("Continue a conversation, as events of a response", Responses, _GENERATING)},
    "/v1/embeddings": {"post": ("Texts or tokens to vectors", Embeddings, _GENERATING)},
    "/v1/models": {"get": ("The model that is served", None, ())},
    "/v1/models/{id}": {"get": ("The same, by its name", None, ("404",))},
    "/tokenize": {"post": ("Text or messages to token ids", Tokenize, ("400", "404"))},
    "/detokenize": {"post": ("Token ids to text", Detokenize, ("400", "404"))},
    "/v1/requests/{id}": {
        "get": ("State of a request: why is it waiting?", None, ("404",)),
        "delete": ("End a request", None, ("404",)),
    },
    "/v1/requests/{id}/stream": {
        "get": ("Take a stream up again, behind Last-Event-ID or from `offset` on", None, ("400", "404", "416", "499"))
    },
}
_QUERY = [
    {
        "name": "offset",
        "in": "query",
        "description": "output tokens that the client has",
        "schema": {"type": "integer", "minimum": 0, "maximum": UINT32},
    },
    {"name": "as", "in": "query", "description": "shape of the events", "schema": {"enum": ["chat", "completion"]}},
    {"name": "Last-Event-ID", "in": "header", "description": "goes before offset", "schema": {"type": "string"}},
]


@cache
def document() -> dict[str, Any]:
    kinds = {kind for calls in _PATHS.values() for _, kind, _ in calls.values() if kind is not None}
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in sorted(kinds, key=lambda kind: kind.__name__)], ref_template=_REFERENCE
    )
    error = {
        "type": "object",
        "required": ["message", "type", "param", "code"],
        "properties": {
            "message": {"type": "string"},
            "type": {"type": "string"},
            "param": {"type": ["string", "null"]},
            "code": {"type": "string"},
        },
    }
    schemas["$defs"]["Error"] = {"type": "object", "required": ["error"], "properties": {"error": error}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "LAPS-SD", "version": version("laps-sd"), "license": {"name": "Apache-2.0"}},
        "paths": {
            path: {verb: _operation(path, *call) for verb, call in calls.items()} for path, calls in _PATHS.items()
        },
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(path: str, summary: str, kind: type[Body] | None, errors: tuple[str, ...]) -> dict[str, Any]:
    refused = {"schema": {"$ref": _REFERENCE.format(model="Error")}}
    answers: dict[str, Any] = {"200": {"description": "the answer"}}
    for status in sorted({*errors, "401", "403", "413", "503"}):
        answers[status] = {"description": ERRORS[status], "content": {"application/json": refused}}
    operation: dict[str, Any] = {"summary": summary, "responses": answers}
    if kind is not None:
        schema = {"$ref": _REFERENCE.format(model=kind.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    parameters = ([_REQUEST_ID] if "{id}" in path else []) + (_QUERY if path.endswith("/stream") else [])
    return operation | ({"parameters": parameters} if parameters else {})
