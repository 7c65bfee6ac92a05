"""POST /v1/embeddings: each input a request of its own, of which nothing is asked but its prompt's embedding. A client
that hangs up cancels them."""

import asyncio
import base64
from array import array
from collections.abc import Sequence
from time import monotonic as now
from typing import Any

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
        """Of each input the embedding, and its tokens. An input for which there is no room is asked for again once
        another one of these is made: the room may be theirs."""
        free = asyncio.Semaphore(min(AT_ONCE, self._front.most_at_once, len(self._inputs)))
        limit_s, began = self._body.timeout_s, now()
        asked = made = lost = smooth = 0  # how many are now, and were; places given up, and how many were made since

        async def one(number: int) -> tuple[Sequence[float], int]:
            nonlocal asked, made, lost, smooth
            await free.acquire()
            while True:
                made_before, asked = made, asked + 1
                left_s = None if limit_s is None else max(0.0, limit_s - (now() - began))
                try:
                    found = await self._one(number, left_s)
                except QueueFull:
                    asked, smooth = asked - 1, 0
                    if asked:
                        lost += 1  # its place is not given back: one fewer is asked for at a time
                        await free.acquire()
                    elif made == made_before:  # whoever has the room, it is none of these
                        raise
                else:
                    asked, made, smooth = asked - 1, made + 1, smooth + 1
                    free.release()
                    if lost and smooth > 2 * asked + 2:  # it was crowded for a while: one more again
                        lost, smooth = lost - 1, 0
                        free.release()
                    return found

        try:
            async with asyncio.TaskGroup() as tasks:
                each = [tasks.create_task(one(number)) for number in range(len(self._inputs))]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return [task.result() for task in each]

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
