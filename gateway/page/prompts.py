"""The page's box for a prompt: its answer as lines of JSON, and a handful of sample prompts sent at once. What a prompt
says is neither kept nor shown to anybody else."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request

from gateway.front import Front
from gateway.http import errors
from gateway.stream import Stream
from protos.errors import BadInput, QueueFull, RequestError
from protos.times import seconds
from protos.v1 import inference_pb2, types_pb2

MOST_CHARACTERS = 8000  # of a prompt in the box
MOST_TOKENS = 1024
DEFAULT_TOKENS = 160
SAMPLES_S = 300.0

# Short and long answers mixed, so that there is something to order.
SAMPLES = (
    ("Tell a story about a lighthouse keeper who befriends a whale.", 220),
    ("Write an HTML table of the numbers from 1 to 8 and their squares.", 200),
    ("What is the capital of France?", 16),
    ("List the months of the year, each with the number of its days.", 160),
    ("Write a Python function that checks whether a number is prime, with comments.", 200),
    ("Who wrote Romeo and Juliet?", 24),
    ("A train covers 120 km in 90 minutes. What is its average speed? Think step by step.", 140),
    ("Say good morning in Spanish.", 16),
    ("Repeat five times: the short request overtakes the long one.", 90),
    ("Name three primary colors.", 32),
    ("Why is the sky blue? Answer in two sentences.", 70),
    ("Write a SQL query that counts the orders of each customer.", 110),
)


async def read_prompt(request: Request) -> tuple[str, int]:
    """The text and the most tokens of its answer, of the body `{"prompt": text, "max_tokens": number}`. Raises
    BadInput."""
    try:
        body = json.loads(await request.body())
    except ClientDisconnect:
        raise BadInput("body", "cut off") from None
    except (ValueError, RecursionError):
        raise BadInput("body", "is not JSON") from None
    text, tokens = (body.get("prompt"), body.get("max_tokens", DEFAULT_TOKENS)) if isinstance(body, dict) else ("", 0)
    if not (isinstance(text, str) and text.strip()):
        raise BadInput("prompt", "write something")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise BadInput("prompt", "holds half a character")
    if len(text) > MOST_CHARACTERS:
        raise BadInput("prompt", f"{len(text)} characters, of at most {MOST_CHARACTERS}")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= MOST_TOKENS:
        raise BadInput("max_tokens", f"must be a whole number from 1 to {MOST_TOKENS}")
    return text, tokens


def generation(front: Front, text: str, most_tokens: int) -> inference_pb2.GenerateRequest:
    """For the first model that is served: a conversation, or a bare prompt if it knows no conversations. Raises
    NotServing."""
    model = next(iter(front.models(ready=True).values()))
    request = inference_pb2.GenerateRequest(model=model.name, max_tokens=most_tokens)
    if model.has_chat_template:
        request.chat.messages.add(role="user", content=text)
    else:
        request.prompt = text
    return request


@asynccontextmanager
async def answered(front: Front, request: inference_pb2.GenerateRequest) -> AsyncIterator[AsyncIterator[str]]:
    """The answer as lines of JSON: its id, its chunks with their rounds (tokens, drafted, accepted), its end; or the
    error that broke it off. Raises RequestError while it has not begun. Leaving the block early ends the request."""
    async with front.generate(request) as stream:
        await stream.accepted()
        yield _lines(stream)


async def _lines(stream: Stream) -> AsyncIterator[str]:
    yield _line(id=stream.request_id, prompt_tokens=stream.prompt_tokens)
    try:
        async for chunk in stream:
            rounds = [[one.tokens, one.drafted, one.accepted] for one in chunk.rounds]
            more = {"final": _final(chunk.final)} if chunk.final is not None else {}
            yield _line(text=chunk.text, rounds=rounds, **more)
    except RequestError as error:
        yield _line(**errors.body(error))


def _final(final: inference_pb2.Final) -> dict[str, Any]:
    return {
        "reason": types_pb2.FinishReason.Name(final.finish_reason).removeprefix("FINISH_REASON_").lower(),
        "output": final.usage.completion_tokens,
        "drafted": final.spec_decode.num_draft_tokens,
        "accepted": final.spec_decode.num_accepted_tokens,
        "pauses": final.preemptions,
        "queued_s": round(seconds(final.queue_time), 3),
    }


def _line(**fields: Any) -> str:
    return json.dumps(fields, separators=(",", ":")) + "\n"


class Samples:
    """The sample prompts, all at once, and never twice at a time. Their answers are thrown away."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._running: asyncio.Task[None] | None = None

    def send(self) -> int:
        """How many are sent. Raises QueueFull while those before still run; NotServing."""
        if self._running is not None and not self._running.done():
            raise QueueFull("the samples are still running", retry_after_ms=2000)
        self._front.models(ready=True)
        self._running = asyncio.create_task(self._run(), name="page samples")
        return len(SAMPLES)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for text, most_tokens in SAMPLES:
                tasks.create_task(self._one(text, most_tokens))

    async def _one(self, text: str, most_tokens: int) -> None:
        try:
            async with self._front.generate(generation(self._front, text, most_tokens), SAMPLES_S) as stream:
                async for _ in stream:
                    pass
        except RequestError:
            return  # the page shows what was refused, as a figure
