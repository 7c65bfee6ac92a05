"""The gateway's metrics, under vLLM's names. Nothing is decided here. What waits and runs is the scheduler's to tell,
and how drafts are accepted the workers'."""

import time
from collections.abc import Callable

from gateway.answer import Answer
from protos.metrics import GEN_AI, PER_TOKEN_S, PREFIX, TOKENS, Distribution, Families, loop_lag


class Metrics(Families):
    """Times are in seconds. `live`: how many requests are submitted and not finished.

    An answer counts at the call that submits its request, not at those that take it up or read it again. The scheduler
    counts each request once, however it is read."""

    def __init__(self, prefix: str = PREFIX, model: Callable[[], str] = str, live: Callable[[], int] = int) -> None:
        super().__init__(prefix, model)
        self.lag = loop_lag(self)
        self.requests = self.counts("requests", "Streams that ended, by gRPC status", "status")
        self.http_answers = self.counts(
            "http_responses", "Answers of the HTTP port under /v1, by HTTP status", "status"
        )
        self.ignored_fields = self.counts("http_ignored_fields", "Fields of HTTP bodies that nobody here knows", "path")
        text = "Requests finished at the call that submitted them, by finish reason: Resume counts nothing"
        self.success = self.counts("request_success", text, "finished_reason")
        self.gauge("num_requests_live", "Requests of this gateway, submitted and not finished", lambda: float(live()))
        self.prompt_tokens = self.counts("prompt_tokens", "Prompt tokens of finished requests")
        self.generation_tokens = self.counts("generation_tokens", "Output tokens of finished requests")
        self.ttft = self.distribution("time_to_first_token_seconds", "From the call to the first output token")
        self.itl = self.distribution(
            "inter_token_latency_seconds", "Between two batches of tokens of an answer", PER_TOKEN_S
        )
        self.e2e = self.distribution("e2e_request_latency_seconds", "From the call to its end")
        self.tpot = self.distribution(
            "request_time_per_output_token_seconds", "(e2e - ttft) / (output tokens - 1)", PER_TOKEN_S
        )
        for name, ours, kept in (
            ("request_duration_seconds", "e2e_request_latency_seconds", self.e2e),
            ("time_to_first_token_seconds", "time_to_first_token_seconds", self.ttft),
            ("time_per_output_token_seconds", "request_time_per_output_token_seconds", self.tpot),
        ):
            text = f"{prefix}{ours} by OpenTelemetry's name, with the label gen_ai_request_model"
            self.histogram(name, text, lambda kept=kept: kept, convention=GEN_AI)  # type: ignore[misc]
        self.prompt_lengths = self.distribution("request_prompt_tokens", "Prompt tokens of a finished request", TOKENS)
        self.output_lengths = self.distribution(
            "request_generation_tokens", "Output tokens of a finished request", TOKENS
        )

    def answer(self, *, counted: bool = True) -> Answer:
        """One that begins now."""
        return Answer(self.ttft, self.itl) if counted else Answer(Distribution(()), Distribution(()))

    def finished(self, answer: Answer, prompt_tokens: int) -> None:
        """Count a request whose answer is whole."""
        self.success[answer.finish_reason] += 1
        self.prompt_tokens[""] += prompt_tokens
        self.generation_tokens[""] += answer.tokens
        self.prompt_lengths.observe(prompt_tokens)
        self.output_lengths.observe(answer.tokens)
        e2e_s = time.monotonic() - answer.started
        self.e2e.observe(e2e_s)
        if answer.ttft_s is not None and answer.tokens > 1:
            self.tpot.observe((e2e_s - answer.ttft_s) / (answer.tokens - 1))
