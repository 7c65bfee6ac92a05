"""The calls of inference.GRPCInferenceService. What a tensor means is in request.py; what is done with a request, in
front.py."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import grpc
import structlog

from gateway.front import Front
from gateway.oip import tensors
from gateway.oip.outputs import Outputs
from gateway.oip.request import Asked, understand
from gateway.service import answers_errors
from gateway.text import TextModel
from protos.channels import PUBLIC_MESSAGE_BYTES
from protos.errors import BadInput, Failed, NotServing, QueueFull, RequestError, UnknownModel
from protos.logs import trace
from protos.oip import inference_pb2 as pb
from protos.oip import inference_pb2_grpc

NAME = "laps-sd"
MODEL_VERSION = "1"
MOST_NAME_CHARS = 1024  # of a request's id, and of a model's name in an error
MOST_AT_ONCE = 256  # requests of one stream that are answered at a time
MOST_BYTES = PUBLIC_MESSAGE_BYTES - 64  # of a response, which a stream's message has around it
FINAL = "triton_final_response"
Context = Any  # grpc.aio.ServicerContext: grpc is not typed
Write = Callable[[pb.ModelStreamInferResponse], Awaitable[None]]
Send = Callable[[pb.ModelInferResponse], Awaitable[None]]


@asynccontextmanager
async def _named_as_tensors() -> AsyncIterator[None]:
    """The prompt comes in a tensor, by whose name errors tell of it."""
    try:
        yield
    except BadInput as error:
        if error.field != "prompt":
            raise
        raise BadInput("text_input", error.problem) from error


class OpenInference(inference_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, front: Front, stalled_s: float) -> None:
        """`stalled_s`: a stream whose client reads nothing for so many seconds ends."""
        self._front, self._stalled_s = front, stalled_s

    @answers_errors
    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:  # noqa: N802
        return pb.ServerLiveResponse(live=True)

    @answers_errors
    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:  # noqa: N802
        return pb.ServerReadyResponse(ready=self._front.ready)

    @answers_errors
    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:  # noqa: N802
        try:
            known = self._serves(request.name, request.version)
        except NotServing:
            return pb.ModelReadyResponse(ready=False)
        if not known:  # strangers may ask, and learn no other name
            raise UnknownModel("this model is not served")
        return pb.ModelReadyResponse(ready=self._front.takes(request.name))

    @answers_errors
    async def ServerMetadata(  # noqa: N802
        self, request: pb.ServerMetadataRequest, context: Context
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name=NAME, version=version("laps-sd"), extensions=["model_configuration"])

    @answers_errors
    async def ModelMetadata(  # noqa: N802
        self, request: pb.ModelMetadataRequest, context: Context
    ) -> pb.ModelMetadataResponse:
        return pb.ModelMetadataResponse(
            name=self._model(request.name, request.version).name,
            versions=[MODEL_VERSION],
            platform=NAME,
            inputs=tensors.metadata(tensors.INPUTS.values()),
            outputs=tensors.metadata(tensors.OUTPUTS.values()),
        )

    @answers_errors
    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:  # noqa: N802
        name = self._model(request.name, request.version).name
        return pb.ModelConfigResponse(config=tensors.configuration(name, NAME))

    @answers_errors
    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:  # noqa: N802
        asked = self._understand(request)
        if asked.stream:
            raise BadInput("stream", "ModelInfer answers whole; ModelStreamInfer streams")
        answers: list[pb.ModelInferResponse] = []

        async def keep(response: pb.ModelInferResponse) -> None:
            answers.append(response)

        await self._answer(request, asked, context.time_remaining(), keep)
        return answers[-1]

    @answers_errors
    async def ModelStreamInfer(  # type: ignore[override] # noqa: N802
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> None:
        """When the client sends no more, what it asked for is still answered; when it hangs up, all is cancelled. A
        client that sends and does not read is not read from either: its requests would be kept without bound. Raises
        QueueFull if it goes on so."""
        writing = asyncio.Lock()  # grpc takes one write at a time
        now = asyncio.get_running_loop().time

        def wait_until(at: float | None) -> None:
            if not patience.expired():  # else this task is cancelled in a moment
                patience.reschedule(at)

        async def write(message: pb.ModelStreamInferResponse) -> None:
            async with writing:
                wait_until(now() + self._stalled_s)
                try:
                    await context.write(message)
                except grpc.aio.BaseError as error:  # the client has hung up, and the call is not cancelled yet
                    raise asyncio.CancelledError from error
                wait_until(None)

        places = asyncio.Semaphore(MOST_AT_ONCE)
        unreadable: RequestError | None = None
        try:
            async with asyncio.timeout(None) as patience, asyncio.TaskGroup() as answering:
                try:
                    async for request in requests:
                        await places.acquire()
                        relay = answering.create_task(self._relay(request, write, context.time_remaining()))
                        relay.add_done_callback(lambda _: places.release())
                except RequestError as error:
                    unreadable = error
        except TimeoutError:
            raise QueueFull(f"nothing was read for {self._stalled_s:g} s") from None
        if unreadable is not None:
            raise unreadable

    async def _relay(self, request: pb.ModelInferRequest, write: Write, remaining_s: float | None) -> None:
        """Answer one request of a stream. What is wrong with it is written, too; the request is not kept for that."""
        failed = pb.ModelInferResponse(id=request.id[:MOST_NAME_CHARS], model_name=request.model_name[:MOST_NAME_CHARS])
        failed.parameters[FINAL].bool_param = True

        async def send(response: pb.ModelInferResponse) -> None:
            await write(pb.ModelStreamInferResponse(infer_response=response))

        try:
            await self._answer(request, self._understand(request), remaining_s, send)
            return
        except RequestError as error:  # its frames hold the request
            problem = f"{error.code.name}: {error.message}"
        except Exception as error:
            structlog.get_logger().error("unexpected", call="ModelStreamInfer", trace=trace(error))
            problem = f"{Failed.code.name}: internal error"
        del request
        await write(pb.ModelStreamInferResponse(error_message=problem, infer_response=failed))

    async def _answer(self, request: pb.ModelInferRequest, asked: Asked, remaining_s: float | None, send: Send) -> None:
        """Send one response a chunk, or one response in all. Raises RequestError."""
        timeouts = [timeout_s for timeout_s in (asked.timeout_s, remaining_s) if timeout_s is not None]
        async with _named_as_tensors(), self._front.generate(asked.request, min(timeouts, default=None)) as stream:
            outputs = Outputs(asked, stream.model, stream.prompt_tokens)
            async for chunk in stream:
                outputs.add(chunk)
                if not (asked.stream or outputs.final):
                    continue
                response = pb.ModelInferResponse(
                    model_name=request.model_name, model_version=MODEL_VERSION, id=request.id
                )
                response.parameters[FINAL].bool_param = outputs.final
                tensors.write(response, outputs.take())
                if (size := response.ByteSize()) > MOST_BYTES:  # grpc would say that something is exhausted
                    problem = f"{size} bytes of answer, and a message has at most {MOST_BYTES}"
                    raise BadInput("stream", f"{problem}: ModelStreamInfer with stream gives them in pieces")
                async with stream.writing(chunk):
                    await send(response)

    def _understand(self, request: pb.ModelInferRequest) -> Asked:
        if len(request.id) > MOST_NAME_CHARS:  # each response repeats it
            raise BadInput("id", f"{len(request.id)} characters; at most {MOST_NAME_CHARS}")
        model = self._model(request.model_name, request.model_version)
        asked = understand(request)
        asked.request.model = model.name
        return asked

    def _serves(self, name: str, model_version: str) -> bool:
        """Raises NotServing."""
        return name in self._front.models() and model_version in ("", MODEL_VERSION)

    def _model(self, name: str, model_version: str) -> TextModel:
        """Raises UnknownModel, NotServing."""
        models = self._front.models()
        if not self._serves(name, model_version):
            served = " and ".join(map(repr, models))
            raise UnknownModel(f"model {name[:64]!r} version {model_version[:16]!r} is not served; {served} is")
        return models[name]
