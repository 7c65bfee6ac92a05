"""The gateway's Prometheus metrics, under vLLM's names with the prefix `laps_sd_`. Nothing is decided here."""

import asyncio
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.answer import Answer
from protos.times import seconds

LAG_EVERY_S = 0.1

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """One registry per gateway. Times are in seconds."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"laps_sd_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _LATENCY_S) -> Histogram:
            return Histogram(f"laps_sd_{name}", text, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Calls of Generate that ended, by gRPC status", "status")
        self.success = counter("request_success", "Finished requests, by finish reason", "finished_reason")
        self.live = Gauge("laps_sd_num_requests_live", "Requests submitted and not finished", registry=registry)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests")
        self.generation_tokens = counter("generation_tokens", "Output tokens of finished requests")
        self.preemptions = counter("num_preemptions", "Preemptions of finished requests")
        self.num_drafts = counter("spec_decode_num_drafts", "Rounds that drafted")
        self.num_draft_tokens = counter("spec_decode_num_draft_tokens", "Drafted tokens")
        self.num_accepted_tokens = counter("spec_decode_num_accepted_tokens", "Accepted draft tokens")
        self.queue_time = histogram("request_queue_time_seconds", "From submission to the first round")
        self.ttft = histogram("time_to_first_token_seconds", "From the call to the first output token")
        self.e2e = histogram("e2e_request_latency_seconds", "From the call to its end")
        self.loop_lag = histogram(
            "event_loop_lag_seconds", f"How late a timer fires that is set every {LAG_EVERY_S:g} s", _PER_TOKEN_S
        )
        self.tpot = histogram(
            "request_time_per_output_token_seconds", "(e2e - ttft) / (output tokens - 1)", _PER_TOKEN_S
        )

    def finished(self, answer: Answer, prompt_tokens: int) -> None:
        """Count a request whose answer is whole."""
        final = answer.final(prompt_tokens)
        self.success.labels(answer.finish_reason).inc()
        self.prompt_tokens.inc(prompt_tokens)
        self.generation_tokens.inc(answer.tokens)
        self.preemptions.inc(final.preemptions)
        self.num_drafts.inc(final.spec_decode.num_drafts)
        self.num_draft_tokens.inc(final.spec_decode.num_draft_tokens)
        self.num_accepted_tokens.inc(final.spec_decode.num_accepted_tokens)
        self.queue_time.observe(seconds(final.queue_time))
        e2e_s = time.monotonic() - answer.started
        self.e2e.observe(e2e_s)
        if answer.ttft_s is not None:
            self.ttft.observe(answer.ttft_s)
            if answer.tokens > 1:
                self.tpot.observe((e2e_s - answer.ttft_s) / (answer.tokens - 1))

    async def measure_loop_lag(self) -> None:
        """Until cancelled. A timer is late by as long as one turn of the event loop lasts."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self.loop_lag.observe(max(0.0, loop.time() - due))
