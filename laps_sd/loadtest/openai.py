"""Any server with OpenAI's HTTP interface, to compare LAPS-SD with. Knows HTTP and server-sent events."""

import asyncio
import json
import ssl
from typing import Any, Self

import httpx2

from laps_sd.loadtest.plan import Planned
from laps_sd.loadtest.record import Record
from laps_sd.loadtest.target import Clock, Refused, Server, Target
from protos.settings import is_loopback

DONE = "[DONE]"
CONNECT_S = 30.0
_TEXTS = ("content", "text", "reasoning", "reasoning_content")  # fields that hold an event's text


class OpenAI(Target):
    """Streams /v1/chat/completions for texts, /v1/completions for synthetic prompts and without a chat template."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        url = server.at.rstrip("/")
        self._base = url if url.endswith("/v1") else f"{url}/v1"
        try:
            parsed = httpx2.URL(self._base)
        except httpx2.InvalidURL as error:
            raise Refused(f"INVALID_ARGUMENT: {server.at!r} is no address: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise Refused(f"INVALID_ARGUMENT: {server.at!r} is no http:// or https:// address")
        if parsed.port is not None and not 0 < parsed.port < 1 << 16:
            raise Refused(f"INVALID_ARGUMENT: {server.at!r} has a port that is none")
        if not (server.api_key or "").isascii():
            raise Refused("INVALID_ARGUMENT: a key has only characters of ASCII")
        if server.api_key and parsed.scheme == "http" and not is_loopback(parsed.host):
            raise Refused(f"INVALID_ARGUMENT: {parsed.host} is another machine: no key goes there but by https://")

    async def __aenter__(self) -> Self:
        server = self.server
        self._http = httpx2.AsyncClient(
            headers={"authorization": f"Bearer {server.api_key}"} if server.api_key else {},
            timeout=httpx2.Timeout(server.timeout_s, connect=CONNECT_S, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            verify=ssl.create_default_context(cafile=server.ca) if server.ca else True,
            trust_env=False,  # else a proxy would be part of what is measured
        )
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._http.aclose()

    async def ready(self) -> None:
        """Returns when the server lists the model. Raises Refused."""
        try:
            response = await self._http.get(f"{self._base}/models", timeout=self.server.ready_s)
            response.raise_for_status()
            models = {model["id"]: model for model in response.json()["data"]}
        except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
            raise Refused(f"UNAVAILABLE: {self._base}/models: {str(error) or type(error).__name__}") from error
        if self.server.model not in models:
            raise Refused(f"NOT_FOUND: model {self.server.model!r}; the server has {', '.join(map(str, models))}")
        self.context_tokens = models[self.server.model].get("max_model_len", 0)  # a field of vLLM and some others

    def prepare(self, planned: Planned) -> tuple[str, dict[str, Any]]:
        text = self.text(planned)
        body: dict[str, Any] = {
            "model": self.server.model,
            "max_tokens": planned.max_tokens,
            "temperature": self.server.temperature,
            "seed": abs(planned.index),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if planned.stop:
            body["stop"] = list(planned.stop)
        if planned.ignore_eos:
            body["ignore_eos"] = True  # not in OpenAI's interface; vLLM and others have it
        if planned.prompt and self.server.chat:
            return "chat/completions", body | {"messages": [{"role": "user", "content": text}]}
        return "completions", body | {"prompt": text}

    async def answer(self, request: tuple[str, dict[str, Any]], record: Record, clock: Clock) -> None:
        path, body = request
        try:
            async with asyncio.timeout(self.server.timeout_s):
                async with self._http.stream("POST", f"{self._base}/{path}", json=body) as response:
                    if response.status_code != 200:
                        words = (await response.aread())[:300].decode(errors="replace")
                        raise Refused(f"HTTP {response.status_code}: {words}")
                    await _read(response, record, clock)
        except TimeoutError as error:
            raise Refused(f"DEADLINE_EXCEEDED: not finished within {self.server.timeout_s:g} s") from error
        except httpx2.HTTPError as error:
            raise Refused(f"{type(error).__name__}: {error}") from error


async def _read(response: httpx2.Response, record: Record, clock: Clock) -> None:
    """Notes each event with text as one output. Raises Refused if the stream breaks off or holds an error."""
    usage: dict[str, Any] = {}
    async for event in httpx2.EventSource(response):
        if event.data == DONE:
            continue  # reads the body to its end, so that the connection can be used again
        try:
            said = json.loads(event.data)
            if said.get("error"):
                raise Refused(f"ERROR: {json.dumps(said['error'])[:300]}")
            usage = dict(said.get("usage") or usage)
            for choice in said.get("choices", ()):
                delta = choice.get("delta") or choice
                if any(delta.get(name) for name in _TEXTS):
                    record.outputs.append((clock(), 1))
                record.finish_reason = choice.get("finish_reason") or record.finish_reason
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise Refused(f"PROTOCOL: {event.data[:100]!r} is no event of OpenAI's") from error
    if not record.finish_reason:
        raise Refused("DATA_LOSS: the stream ended before the answer did")
    record.input_tokens = _count(usage, "prompt_tokens", 0)
    record.output_tokens = _count(usage, "completion_tokens", len(record.outputs))
    _share_out(record)


def _count(usage: dict[str, Any], name: str, otherwise: int) -> int:
    """Some servers say null."""
    return value if isinstance(value := usage.get(name), int) else otherwise


def _share_out(record: Record) -> None:
    """Spreads the tokens evenly over the outputs: the interface gives only their sum."""
    count = len(record.outputs)
    for i, (when_s, _) in enumerate(record.outputs):
        tokens = record.output_tokens * (i + 1) // count - record.output_tokens * i // count
        record.outputs[i] = (when_s, tokens)
