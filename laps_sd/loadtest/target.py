"""A server under load: what all protocols share, and LAPS-SD's own by gRPC. Measures only when outputs come."""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Self

from laps_sd.client import HTTPS, AsyncClient, RequestError
from laps_sd.loadtest.plan import Planned, Words
from laps_sd.loadtest.record import Record
from laps_sd.reach import LISTENS_S, listens

READY_S = 60.0
FEW_WORDS, MORE_WORDS = 8, 40

Clock = Callable[[], float]  # seconds after the start of the run


@dataclass(frozen=True, slots=True)
class Server:
    """The address of a server and how it is asked. Driver processes get this on stdin, API key included."""

    at: str  # HOST:PORT of one gateway or several; with `model` the URL of an OpenAI-compatible server
    model: str | None = None  # of an OpenAI-compatible server; None: the server is LAPS-SD
    api_key: str | None = None
    ca: str = ""  # a PEM file; empty: none
    timeout_s: float = 600.0  # of one request
    ready_s: float = READY_S  # for the server to be ready
    listens_s: float = LISTENS_S  # for anything to listen there
    chat: bool = True  # use the model's chat template, but never for synthetic prompts
    temperature: float = 0.0
    words: Words = field(default_factory=Words)


@dataclass(frozen=True, slots=True)
class Served:
    """Who answered, as far as it says. `policy`: empty where there is none to be told, as of another system."""

    at: str
    model: str
    policy: str = ""

    def facts(self) -> dict[str, str]:
        return {"model": self.model or "not told", "policy": self.policy or "not told", "served at": self.at}

    def __str__(self) -> str:
        return (
            f"{self.model or 'a model not told'}{f' under {self.policy}' if self.policy else ''}, served at {self.at}"
        )


class Refused(Exception):
    """A request failed; the message begins with its status."""


class Target(AbstractAsyncContextManager["Target"]):
    """Open connections to a server."""

    context_tokens = 0  # for prompt and output together; 0: `ready` did not learn it

    def __init__(self, server: Server) -> None:
        self.server = server

    @abstractmethod
    async def ready(self) -> None:
        """Returns when the server serves. Raises Refused."""

    @abstractmethod
    def prepare(self, planned: Planned) -> Any:
        """The request in the protocol's form. Called before the request is due."""

    @abstractmethod
    async def answer(self, request: Any, record: Record, clock: Clock) -> None:
        """Sends the request and notes its answer in `record`. Raises Refused."""

    def text(self, planned: Planned) -> str:
        return planned.prompt or self.server.words.text(planned.prompt_tokens, planned.index)

    async def words(self) -> Words:
        """How many tokens the server's tokenizer makes of synthetic prompts, found by two requests of one output token.
        `server.words` must still be the default. Raises Refused."""
        counts = []
        for words in (FEW_WORDS, MORE_WORDS):
            probe = Record(index=-words, due_s=0.0, free_s=0.0)
            plan = Planned(-words, None, prompt="", prompt_tokens=words, max_tokens=1, ignore_eos=False)
            await self.answer(self.prepare(plan), probe, lambda: 0.0)
            counts.append(probe.input_tokens)
        per_word = (counts[1] - counts[0]) / (MORE_WORDS - FEW_WORDS)
        if per_word <= 0:  # the server does not report input tokens
            return Words()
        return Words(per_word, max(0.0, counts[0] - FEW_WORDS * per_word))


class Grpc(Target):
    """One gateway of LAPS-SD, or several that get requests by round robin."""

    async def __aenter__(self) -> Self:
        server = self.server
        scheme = HTTPS if server.at.startswith(HTTPS) else ""
        self._clients = [
            AsyncClient(scheme + one, api_key=server.api_key, ca=server.ca, max_retries=0)  # it measures what happens
            for one in server.at.removeprefix(HTTPS).split(",")
        ]
        for client in self._clients:
            await client.__aenter__()
        self._next = cycle(self._clients)
        return self

    async def __aexit__(self, *error: Any) -> None:
        for client in self._clients:
            await client.__aexit__(*error)

    async def ready(self) -> None:
        try:
            await listens(self.server.at, self.server.api_key, self.server.ca, self.server.listens_s)
            for client in self._clients:
                await client.ready(self.server.ready_s)
        except RequestError as error:
            raise Refused(f"{error.code.name}: {error.message}") from error

    def prepare(self, planned: Planned) -> dict[str, Any]:
        text = self.text(planned)
        chat = planned.prompt and self.server.chat
        return {
            **({"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}),
            "max_tokens": planned.max_tokens,
            "ignore_eos": planned.ignore_eos,
            "temperature": self.server.temperature,
            "seed": abs(planned.index),
            "predicted_tokens": planned.predicted_tokens,
            "stop": planned.stop,
            "priority": planned.klass,
        }

    async def answer(self, request: dict[str, Any], record: Record, clock: Clock) -> None:
        final = None
        try:
            async for chunk in next(self._next).generate(timeout_s=self.server.timeout_s, **request):
                if chunk.token_ids:
                    record.outputs.append((clock(), len(chunk.token_ids)))
                record.request_id = chunk.request_id
                record.rounds += [(round.tokens, round.drafted, round.accepted) for round in chunk.rounds]
                final = chunk.final
        except RequestError as error:
            raise Refused(f"{error.code.name}: {error.message}") from error
        if final is None:
            raise Refused("DATA_LOSS: the stream ended before the answer did")
        record.input_tokens, record.output_tokens = final.usage.prompt_tokens, final.usage.completion_tokens
        record.queue_ms, record.preemptions = final.queue_time.total_seconds() * 1e3, final.preemptions
        spec = final.spec_decode
        record.drafts, record.drafted, record.accepted = (
            spec.num_drafts,
            spec.num_draft_tokens,
            spec.num_accepted_tokens,
        )
        record.finish_reason = final.finish_reason or ""
        if record.finish_reason == "cancelled":
            raise Refused("CANCELLED: somebody ended it")
