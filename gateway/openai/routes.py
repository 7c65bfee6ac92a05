"""The paths of the OpenAI-compatible API: each reads a body, asks the front, and answers. What fields mean and what
answers look like is said elsewhere."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.front import Front
from gateway.http.access import route
from gateway.http.errors import Unsupported
from gateway.keys import Right
from gateway.metrics import Metrics
from gateway.openai import kept, openapi, own, request, responses, sse, tokens
from gateway.openai.embeddings import Embedding
from gateway.openai.fields import Body, Chat, Completion, Detokenize, Own, Tokenize
from gateway.openai.generating import Generating, generated, resumed
from gateway.openai.inputs import Embeddings
from gateway.openai.parse import parse, unknown
from gateway.openai.request import Asked
from gateway.openai.responding import Responding
from gateway.openai.response_fields import Responses
from gateway.text import TextModel
from protos.errors import REQUEST_ID_KEY, BadInput, Cancelled, NotServing, UnknownModel, UnknownRequest
from protos.v1.inference_pb2 import GetRequestRequest

THREAD_ABOVE_BYTES = 16 << 10  # longer bodies are parsed in a thread; shorter ones take less than a turn of the loop
SomeBody = TypeVar("SomeBody", bound=Body)


def routes(front: Front, metrics: Metrics, aliases: Sequence[str] = ()) -> list[Route]:
    """Every one but the OpenAPI document needs the right to generate. `aliases`: further names of the model."""
    doors = Doors(front, metrics, aliases)
    paths = {
        "/v1/chat/completions": (["POST"], doors.chat),
        "/v1/completions": (["POST"], doors.completion),
        "/v1/responses": (["POST"], doors.response),
        "/v1/embeddings": (["POST"], doors.embedding),
        "/v1/models": (["GET"], doors.models),
        "/v1/models/{id:path}": (["GET"], doors.model),
        "/tokenize": (["POST"], doors.tokenize),
        "/detokenize": (["POST"], doors.detokenize),
        "/v1/requests/{id}/stream": (["GET"], doors.resume),
        "/v1/requests/{id}": (["GET", "DELETE"], doors.request),
    }
    made = [route(path, call, right=Right.GENERATE, methods=methods) for path, (methods, call) in paths.items()]
    made.append(route("/openapi.json", doors.document, right=None))
    return made


class Doors:
    def __init__(self, front: Front, metrics: Metrics, aliases: Sequence[str]) -> None:
        self._front, self._metrics, self._aliases = front, metrics, aliases
        self._created = int(time.time())

    async def chat(self, asked: Request) -> Generating:
        body = await self._body(Chat, asked)
        model = self._model(body.model, ready=True)
        wanted = request.of_chat(body, asked.state.request_id, model.takes)
        wanted = for_model(model, self._placed(wanted, asked, model))
        return Generating(wanted, generated(self._front, wanted))

    async def completion(self, asked: Request) -> Generating:
        body = await self._body(Completion, asked)
        model = self._model(body.model, ready=True)
        wanted = request.of_completion(body, asked.state.request_id, model.context_tokens)
        wanted = for_model(model, self._placed(wanted, asked, model))
        return Generating(wanted, generated(self._front, wanted))

    async def response(self, asked: Request) -> Responding:
        body = await self._body(Responses, asked)
        model = self._model(body.model, ready=True)
        body = await kept.with_items(self._front, body)
        wanted = responses.asked(body, asked.state.request_id, model.takes)
        wanted = for_model(model, self._placed(wanted, asked, model))
        return Responding(body, wanted, generated(self._front, wanted))

    async def embedding(self, asked: Request) -> Embedding:
        body = await self._body(Embeddings, asked)
        model = self._model(body.model, ready=True)
        return Embedding(self._front, body, model, body.request_id or "", asked.state.request_id)

    async def models(self, asked: Request) -> Response:
        models = self._front.models()
        named = models | {name: self._model(name) for name in self._aliases if name not in models}
        cards = [self._card(name, model) for name, model in named.items()]
        return _json({"object": "list", "data": cards})

    async def model(self, asked: Request) -> Response:
        name = asked.path_params["id"]
        return _json(self._card(name, self._model(name)))

    async def tokenize(self, asked: Request) -> Response:
        body = await self._body(Tokenize, asked)
        return _json(await tokens.tokenize(self._front, body, self._model(body.model)))

    async def detokenize(self, asked: Request) -> Response:
        body = await self._body(Detokenize, asked)
        return _json(await tokens.detokenize(self._front, body, self._model(body.model)))

    async def request(self, asked: Request) -> Response:
        return await (self.cancel if asked.method == "DELETE" else self.status)(asked)

    async def status(self, asked: Request) -> Response:
        """Why is this request waiting?"""
        answer = await self._front.get_request(GetRequestRequest(request_id=await self._id(asked)))
        return _json(own.status(answer.request))

    async def cancel(self, asked: Request) -> Response:
        cancelled = await self._front.cancel(await self._id(asked))
        return _json({"id": asked.path_params["id"], "object": "request", "cancelled": cancelled})

    async def resume(self, asked: Request) -> Generating | Response:
        """The rest of a stream, as events of a chat or, with `as=completion`, of a completion. HEAD opens no stream:
        its end could cancel the request."""
        kind = asked.query_params.get("as", "chat")
        if kind not in ("chat", "completion"):
            raise BadInput("as", "must be chat or completion")
        offset = own.offset(asked.query_params.get("offset"), asked.headers.get(own.LAST_EVENT_ID))
        request_id = await self._id(asked)
        if asked.method == "HEAD":
            await self._front.get_request(GetRequestRequest(request_id=request_id))
            head = Response(headers=sse.HEADERS | {REQUEST_ID_KEY: request_id})
            del head.headers["content-length"]  # a stream has none
            return head
        wanted = request.Asked(
            request_id,
            "",
            chat=kind == "chat",
            requests=(),
            stream=True,
            include_usage=True,
            prompt_logprobs=True,
            detached=True,
        )
        return Generating(wanted, resumed(self._front, request_id, offset))

    async def _id(self, asked: Request) -> str:
        """Of the request that the path names: by its id, or by the id of an answer to it, such as chatcmpl-ID."""
        id: str = asked.path_params["id"]
        if (bare := own.of_answer(id)) == id:
            return id
        try:
            await self._front.get_request(GetRequestRequest(request_id=id))
        except UnknownRequest:
            return bare
        except NotServing:  # the cell that such an id would be in; the bare one may name another
            with suppress(UnknownRequest):
                await self._front.get_request(GetRequestRequest(request_id=bare))
                return bare
            raise
        return id

    async def document(self, asked: Request) -> Response:
        return _json(openapi.document())

    async def _body(self, kind: type[SomeBody], asked: Request) -> SomeBody:
        try:
            raw = await asked.body()
        except ClientDisconnect:
            raise Cancelled("the client hung up before its body was whole") from None
        if (coding := asked.headers.get("content-encoding", "identity")) != "identity":
            raise Unsupported("content-encoding", f"{coding[:20]} is not read here: send the body as it is")
        # A megabyte of JSON takes tens of milliseconds, in which others have their turns.
        body = parse(kind, raw) if len(raw) <= THREAD_ABOVE_BYTES else await asyncio.to_thread(parse, kind, raw)
        if ignored := unknown(body):
            self._metrics.ignored_fields[asked.url.path] += len(ignored)
        return own.with_headers(body, asked.headers) if isinstance(body, Own) else body

    def _model(self, name: str, *, ready: bool = False) -> TextModel:
        """The model of that name; an alias is one of the first model. Raises UnknownModel, NotServing."""
        if name in self._aliases and name not in (models := self._front.models()):
            name = next(iter(models))
        if not name:
            raise UnknownModel(f"model: there is no such model; this service has {', '.join(self._front.models())}")
        return self._front.model(name, ready=ready)

    def _placed(self, wanted: Asked, asked: Request, model: TextModel) -> Asked:
        """In a cell, where the id is none that the client chose but one that was drawn for the call."""
        drawn: str = asked.state.request_id
        if wanted.request_id != drawn:
            return wanted
        return wanted.under(self._front.new_id(wanted.requests[0], model.name, drawn))

    def _card(self, name: str, model: TextModel) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "laps-sd",
            "root": model.name,
            "max_model_len": model.context_tokens,
            **({} if "embedding" in model.refused else {"embeddings": {"pooling": "last token", "normalized": True}}),
            **({"refused_fields": model.refused} if model.refused else {}),
            **({"caveats": model.caveats} if model.caveats else {}),
        }


def for_model(model: TextModel, wanted: request.Asked) -> request.Asked:
    """Its requests name the model."""
    for each in wanted.requests:
        each.model = model.name
    return wanted


def _json(value: dict[str, Any]) -> Response:
    return Response(to_json(value), media_type="application/json")
