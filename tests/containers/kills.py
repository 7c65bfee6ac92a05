"""Streams through containers whose main processes are killed meanwhile, and what became of the texts. Which engine runs
the containers is not known here."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from laps_sd.client import AsyncClient, attempts

PROMPTS = ("Once upon a time", "There was a queue", "A short request", "The quick brown fox")
TOKENS = 400
UNDER_WAY = 10  # tokens that each stream has when the kill comes
STREAM_S = 600.0
attempts.RESUME_S = 240.0  # on a busy machine a container may take minutes to come back


@dataclass
class Stream:
    """One answer as it comes. `gap_s`: the longest time between two pieces, the first one included."""

    text: str = ""
    tokens: int = 0
    gap_s: float = 0.0
    under_way: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, client: AsyncClient, prompt: str) -> None:
        last = time.monotonic()
        async with asyncio.timeout(STREAM_S):
            async for chunk in client.generate(
                prompt, max_tokens=TOKENS, ignore_eos=True, temperature=0.0, on_disconnect="detach"
            ):
                self.gap_s, last = max(self.gap_s, time.monotonic() - last), time.monotonic()
                self.text += chunk.text
                self.tokens += len(chunk.token_ids)
                if self.tokens >= UNDER_WAY:
                    self.under_way.set()


@dataclass
class Outcome:
    """Of all kills of one service."""

    kills: int = 0
    streams: int = 0  # that were under way when the kill came
    broken: int = 0  # of them: another text
    gap_s: float = 0.0
    by_policy: int = 0  # restarts that nobody had to ask for


async def undisturbed(client: AsyncClient) -> tuple[list[str], float]:
    """The texts, and the longest gap in them."""
    streams = [Stream() for _ in PROMPTS]
    await asyncio.gather(*(stream.run(client, prompt) for stream, prompt in zip(streams, PROMPTS, strict=True)))
    return [stream.text for stream in streams], max(stream.gap_s for stream in streams)


async def kill(
    client: AsyncClient, texts: list[str], service: str, strike: Callable[[str], bool], outcome: Outcome
) -> None:
    """All streams at once, `strike` once each is under way. `strike` returns when the service runs again."""
    streams = [Stream() for _ in PROMPTS]
    running = [asyncio.create_task(stream.run(client, prompt)) for stream, prompt in zip(streams, PROMPTS, strict=True)]
    starts = [asyncio.create_task(stream.under_way.wait()) for stream in streams]
    try:
        async with asyncio.timeout(STREAM_S):
            await asyncio.gather(*starts)
        in_time = [not task.done() for task in running]
        outcome.by_policy += await asyncio.to_thread(strike, service)
        await asyncio.gather(*running)
    finally:
        for task in (*starts, *running):
            task.cancel()
    outcome.kills += 1
    outcome.streams += in_time.count(True)
    outcome.gap_s = max(outcome.gap_s, *(stream.gap_s for stream in streams))
    outcome.broken += sum(stream.text != text for stream, text in zip(streams, texts, strict=True))
