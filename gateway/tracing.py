"""The gateway's spans: one for each call that streams an answer, with the attributes of OpenTelemetry's conventions for
generative AI. Neither prompt nor answer goes into one."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from gateway.answer import Answer
from protos.errors import Failed, RequestError
from protos.link.v1 import gateway_link_pb2 as pb
from protos.tracing import Tracing, header
from protos.v1 import inference_pb2

if TYPE_CHECKING:
    from opentelemetry.trace import Span

PROVIDER = "laps_sd"
incoming: ContextVar[str] = ContextVar("incoming", default="")  # the valid traceparent of the call that is answered


class CallSpan:
    """The span of one call. Without tracing, or in a trace that is not recorded, it does nothing."""

    def __init__(self, span: "Span | None" = None, operation: str = "") -> None:
        self._operation = operation
        self._span = span if span is not None and span.is_recording() else None

    @property
    def traceparent(self) -> str:
        """For what others do for this call. Empty: nothing is recorded."""
        return header(self._span) if self._span is not None else ""

    def submitted(self, model: str, submit: pb.Submit) -> None:
        """It is known what is asked of which model."""
        if self._span is None:
            return
        self._span.update_name(f"{self._operation} {model}")
        sampling = submit.sampling
        self._span.set_attributes(
            {
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.response.id": submit.request_id,
                "gen_ai.request.max_tokens": submit.limits.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.seed": str(sampling.seed),  # an attribute has 64 bits and a sign
                "gen_ai.usage.input_tokens": len(submit.prompt),
            }
        )

    def answered(self, answer: Answer) -> None:
        """As far as it came."""
        if self._span is None:
            return
        self._span.set_attributes(
            {
                "gen_ai.usage.output_tokens": answer.tokens,
                "gen_ai.response.finish_reasons": [answer.finish_reason],
                "gen_ai.latency.e2e": time.monotonic() - answer.started,
            }
        )
        if answer.ttft_s is not None:
            self._span.set_attribute("gen_ai.latency.time_to_first_token", answer.ttft_s)
        if answer.ending is not None:
            self._span.set_attribute("gen_ai.latency.time_in_queue", answer.ending.queue_ms / 1000)

    def failed(self, reason: str) -> None:
        if self._span is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", reason)
            self._span.set_status(StatusCode.ERROR)


@contextmanager
def traced(tracing: Tracing | None, operation: str) -> Iterator[CallSpan]:
    """The block answers a call. `operation`: chat, text_completion, embeddings, or resume."""
    if tracing is None:
        yield CallSpan()
        return
    span = tracing.begin(operation, incoming.get())
    call = CallSpan(span, operation)
    span.set_attributes({"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER})
    try:
        yield call
    except RequestError as error:
        call.failed(error.reason)
        raise
    except (asyncio.CancelledError, GeneratorExit):
        call.failed("CANCELLED")
        raise
    except Exception:
        call.failed(Failed.reason)
        raise
    finally:
        span.end()


def operation(request: inference_pb2.GenerateRequest) -> str:
    if request.embedding:
        return "embeddings"
    return "chat" if request.WhichOneof("input") == "chat" else "text_completion"
