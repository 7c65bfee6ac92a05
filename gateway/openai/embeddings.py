"""POST /v1/embeddings: each input a request of its own, of which nothing is asked but its prompt's embedding. A client
that hangs up cancels them."""

import asyncio
import base64
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from time import monotonic as now
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.front import Front
from gateway.http.errors import Unsupported
from gateway.openai import sse
from gateway.openai.inputs import Embeddings
from gateway.openai.request import CLASSES, DISCONNECT, id_of, inputs, of_input
from gateway.text import TextModel
from protos.errors import REQUEST_ID_KEY, BadInput, Cancelled, QueueFull
from protos.v1 import inference_pb2 as pb

T = TypeVar("T")
MAX_INPUTS = 2048
AT_ONCE = 32  # inputs of one body that are requests at the same time


class Embedding:
    """An ASGI response: the work is done while it is sent. Raises RequestError."""

    def __init__(self, front: Front, body: Embeddings, model: TextModel, own_id: str, drawn: str) -> None:
        """`own_id`: the client's, if any; `drawn`: what the service's own begins with."""
        if body.dimensions is not None:
            raise Unsupported("dimensions", "not supported: the model's embeddings cannot be cut short")
        self._front, self._body, self._model = front, body, model
        self._inputs = inputs("input", body.input)
        if len(self._inputs) > MAX_INPUTS:
            raise BadInput("input", f"{len(self._inputs)} inputs; at most {MAX_INPUTS}")
        self._id = own_id or front.new_id(self._asked(0), model.name, drawn)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with sse.while_connected(receive):
            made = await self._all()
            body = await asyncio.to_thread(self._told, made)
            await Response(body, 200, {REQUEST_ID_KEY: self._id}, "application/json")(scope, receive, send)

    async def _all(self) -> list[tuple[Sequence[float], int]]:
        """Of each input the embedding, and its tokens."""
        places = Places(min(AT_ONCE, self._front.most_at_once, len(self._inputs)))
        limit_s, began = self._body.timeout_s, now()

        def attempt(number: int) -> Coroutine[Any, Any, tuple[Sequence[float], int]]:
            return self._one(number, None if limit_s is None else max(0.0, limit_s - (now() - began)))

        try:
            async with asyncio.TaskGroup() as tasks:
                made = [tasks.create_task(places.make(partial(attempt, n))) for n in range(len(self._inputs))]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return [each.result() for each in made]

    async def _one(self, number: int, timeout_s: float | None) -> tuple[Sequence[float], int]:
        asked = self._asked(number)
        embedding: Sequence[float] = ()
        asked.request_id = self._id if len(self._inputs) == 1 else id_of(number, self._id)
        try:
            async with self._front.generate(asked, timeout_s) as stream:
                await stream.accepted()
                async for chunk in stream:  # to its end, when it is counted
                    embedding = chunk.embedding or embedding
                if embedding:
                    return embedding, stream.prompt_tokens
        except BadInput as error:
            if error.field == "embedding":  # no field of the body: the model's engine has none
                raise type(error)("model", f"embeddings are {error.problem}") from None
            field = "input" if error.field in ("prompt", "tokens", "input") else error.field
            raise type(error)(field, error.problem) from None
        raise Cancelled("the request was cancelled")

    def _asked(self, number: int) -> pb.GenerateRequest:
        """For one of the inputs, still without an id."""
        asked = of_input(self._inputs[number])
        asked.MergeFrom(
            pb.GenerateRequest(
                model=self._model.name,
                max_tokens=0,
                embedding=True,
                priority=CLASSES[self._body.class_],
                on_disconnect=DISCONNECT[self._body.on_disconnect],
                predicted_tokens=self._body.predicted_tokens,
            )
        )
        return asked

    def _told(self, made: Sequence[tuple[Sequence[float], int]]) -> bytes:
        tokens = sum(each for _, each in made)
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(values)}
            for index, (values, _) in enumerate(made)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return to_json({"object": "list", "data": data, "model": self._body.model, "usage": usage})

    def _encoded(self, values: Sequence[float]) -> Any:
        """base64: little-endian float32."""
        if self._body.encoding_format == "float":
            return list(values)
        return base64.b64encode(array("f", values).tobytes()).decode()


class Places:
    """How many inputs of one body are asked for at a time. A refusal for want of room costs a place, for the body's own
    inputs may have the room. A place comes back after some inputs in a row were made."""

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)
        self._asked = self._made = 0  # inputs that are asked for now; inputs that were made
        self._lost = self._in_a_row = 0  # places; inputs made since the last refusal

    async def make(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """What `attempt` returns, tried again as long as it is refused. Raises QueueFull if the body has no other input
        that may have the room."""
        await self._free.acquire()
        while True:
            made_before, self._asked = self._made, self._asked + 1
            try:
                result = await attempt()
            except QueueFull:
                self._asked, self._in_a_row = self._asked - 1, 0
                if self._asked:
                    self._lost += 1
                    await self._free.acquire()
                elif self._made == made_before:
                    raise
            else:
                self._asked, self._made, self._in_a_row = self._asked - 1, self._made + 1, self._in_a_row + 1
                self._free.release()
                if self._lost and self._in_a_row > 2 * self._asked + 2:
                    self._lost, self._in_a_row = self._lost - 1, 0
                    self._free.release()
                return result
