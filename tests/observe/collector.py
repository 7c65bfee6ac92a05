"""An OpenTelemetry collector in this process: OTLP over real gRPC, which keeps the spans that it gets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc

from tests.waiting import until


class Collector(rpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: dict[tuple[str, str], Any] = {}  # by service and name
        self.raw = b""  # all that came
        self.endpoint = ""

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.raw += request.SerializeToString()
        for resource in request.resource_spans:
            (service,) = (
                each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
            )
            for scope in resource.scope_spans:
                self.spans |= {(service, span.name): span for span in scope.spans}
        return pb.ExportTraceServiceResponse()

    async def until(self, *names: tuple[str, str]) -> list[Any]:
        """The spans of these services and names, once all have come."""

        async def here() -> bool:
            return self.spans.keys() >= set(names)

        try:
            await until(here)
        except TimeoutError:
            raise TimeoutError(f"only {sorted(self.spans)} of {names} came") from None
        return [self.spans[name] for name in names]


def attributes(span: Any) -> dict[str, Any]:
    """Of a span, as Python's values."""
    return {each.key: _value(each.value) for each in span.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    # A port of its own: two servers that share one would share the spans, too.
    server, kept = grpc.aio.server(options=[("grpc.so_reuseport", 0)]), Collector()
    rpc.add_TraceServiceServicer_to_server(kept, server)
    kept.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield kept
    finally:
        await server.stop(None)
