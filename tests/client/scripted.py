"""A gateway that answers what a test tells it to, in threads, so that both clients can be tested. No assertions live
here."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from protos.errors import RequestError
from protos.v1 import inference_pb2, inference_pb2_grpc, status_pb2, types_pb2
from tests.waiting import WAIT_S

Step = inference_pb2.GenerateResponse | RequestError | grpc.StatusCode | None


def chunk(offset: int, tokens: Sequence[int], text: str = "", **fields: Any) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(request_id="r", offset=offset, token_ids=tokens, text=text, **fields)


def last(offset: int, tokens: Sequence[int] = (), text: str = "") -> inference_pb2.GenerateResponse:
    usage = inference_pb2.Usage(prompt_tokens=3, completion_tokens=offset + len(tokens))
    final = inference_pb2.Final(finish_reason=types_pb2.FINISH_REASON_LENGTH, usage=usage)
    return chunk(offset, tokens, text, final=final)


class Gateway(inference_pb2_grpc.InferenceServicer):
    """`script`: for each call in turn what it sends, one after the other; an error or a status ends it; None:
    it waits until its client is gone. `asked`: every
    request that came."""

    def __init__(self, *script: Sequence[Step]) -> None:
        self.script, self.asked = [list(steps) for steps in script], list[Any]()
        self.target = ""
        self.health = health.HealthServicer()

    def Generate(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateResponse]:  # noqa: N802
        yield from self._play(request, context)

    def Resume(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateResponse]:  # noqa: N802
        yield from self._play(request, context)

    def Stats(self, request: Any, context: Any) -> status_pb2.StatsResponse:  # noqa: N802
        list(self._play(request, context))
        return status_pb2.StatsResponse(policy="fcfs", waiting=3)

    def DrainWorker(self, request: Any, context: Any) -> inference_pb2.DrainWorkerResponse:  # noqa: N802
        list(self._play(request, context))
        return inference_pb2.DrainWorkerResponse(remaining=1)

    def _play(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateResponse]:
        self.asked.append(request)
        for step in self.script.pop(0) if self.script else []:
            if step is None:
                gone = threading.Event()
                if context.add_callback(gone.set):
                    gone.wait(WAIT_S)
                return
            if isinstance(step, RequestError):
                context.set_trailing_metadata(step.trailers)
                context.abort(step.code, step.message)
            if isinstance(step, grpc.StatusCode):
                context.abort(step, "broken")
            yield step


@contextmanager
def serving(gateway: Gateway, credentials: grpc.ServerCredentials | None = None) -> Iterator[Gateway]:
    """Behind a real port."""
    server = grpc.server(ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServicer_to_server(gateway, server)
    health_pb2_grpc.add_HealthServicer_to_server(gateway.health, server)
    bind: Callable[[str], int] = server.add_insecure_port
    if credentials is not None:
        bind = lambda at: int(server.add_secure_port(at, credentials))  # noqa: E731
    gateway.target = f"127.0.0.1:{bind('127.0.0.1:0')}"
    server.start()
    try:
        yield gateway
    finally:
        server.stop(None).wait()
