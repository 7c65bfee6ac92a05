"""OpenTelemetry traces: how a service sends its spans to a collector, and how a trace goes from service to service. The
services say what is a span. No text of a client ever goes into one.

OpenTelemetry is imported when tracing is on, and only then. Spans are sent by a thread of its own: a collector that is
slow or away costs spans, and nothing else.
"""

import logging
import os
import re
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import structlog

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

Attribute: TypeAlias = str | bool | int | float | list[str]

MAX_QUEUE = 4096  # spans that wait to be sent; more are dropped
BATCH = 512
SEND_EVERY_S = 1.0
SEND_TIMEOUT_S = 5.0
CLOSE_S = 1.0  # how long the end of a service may wait for its last spans

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")  # variables that every program obeys

# The W3C's header: version, trace id, span id, flags. The lowest bit of the flags says that the trace is sampled.
TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
TRACEPARENT_KEY = "traceparent"


def traceparent(header: str | None) -> str:
    """The header of a request if it is valid, else empty. One that is not must do no harm."""
    return header if header is not None and TRACEPARENT.fullmatch(header) else ""


def sampled(parent: str) -> bool:
    """Whether the trace of this traceparent is recorded. An empty one is not."""
    return bool(parent) and bool(int(parent[-2:], 16) & 1)


class Tracing:
    """The spans of one service."""

    def __init__(self, service: str, endpoint: str, ratio: float = 1.0) -> None:
        """`service`: its name in every trace. `endpoint`: of the collector, as in `make`. `ratio`: of traces that begin
        here, how many are recorded; those that came with a traceparent are recorded if that says so."""
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # we say ourselves, and once, what goes wrong
        exporter = OTLPSpanExporter(endpoint=endpoint or None, timeout=SEND_TIMEOUT_S)
        self._processor = BatchSpanProcessor(
            _telling(exporter, structlog.get_logger()),
            max_queue_size=MAX_QUEUE,
            schedule_delay_millis=SEND_EVERY_S * 1000,
            max_export_batch_size=BATCH,
        )
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)),
            resource=Resource.create({"service.name": f"laps-sd-{service}"}),
            shutdown_on_exit=False,  # it could wait for half a minute
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("laps_sd")

    def begin(self, name: str, parent: str) -> "Span":
        """A span of a call that is being answered. `parent`: a traceparent, or empty: then a trace begins."""
        from opentelemetry.trace import SpanKind

        return self._tracer.start_span(name, context=_context(parent), kind=SpanKind.SERVER)

    def span(
        self,
        parent: str,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> None:
        """A span that is over. Times are seconds since the Unix epoch."""
        begun = self._tracer.start_span(
            name, context=_context(parent), start_time=round(start_s * 1e9), attributes=attributes
        )
        begun.end(round(end_s * 1e9))

    def close(self) -> None:
        """Send what is left, for at most CLOSE_S. A thread that still hangs in a sending ends with the process."""
        closing = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def header(span: "Span") -> str:
    """The traceparent of the spans below this one."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def make(service: str, endpoint: str, ratio: float) -> Tracing | None:
    """None: tracing is off, since no collector is named. `endpoint`: http://HOST:PORT or https://HOST:PORT of OTLP over
    gRPC; empty: as OpenTelemetry's own environment variables say."""
    if endpoint or any(map(os.environ.get, ENDPOINTS)):
        return Tracing(service, endpoint, ratio)
    return None


def _context(parent: str) -> "Context":
    from opentelemetry import trace
    from opentelemetry.context import Context

    if not parent:
        return Context()
    _, trace_id, span_id, flags = parent.split("-")
    remote = trace.SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=trace.TraceFlags(int(flags, 16))
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(remote), Context())


def _telling(exporter: "SpanExporter", log: Any) -> "SpanExporter":
    """The same exporter, which logs when sending begins to fail and when it works again."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Telling(SpanExporter):
        failing = False

        def export(self, spans: Any) -> SpanExportResult:
            result = exporter.export(spans)
            failed = result is not SpanExportResult.SUCCESS
            if failed != self.failing:
                self.failing = failed
                (log.warning if failed else log.info)("traces_not_sent" if failed else "traces_sent_again")
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return Telling()
