"""Clients of all sorts, one stream after the other each, and every stream checked. It knows nothing of faults."""

import asyncio
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Any

from laps_sd.client import AsyncClient, Chunk
from protos.errors import BeyondEnd, Lost, NotServing, QueueFull, RequestError
from tests.chaos.book import Book, Text
from tests.chaos.checker import CANCELLED, WHOLE, Piece, problems

STREAM_S = 240.0  # a stream that is not whole by then is lost
RETRY_S = 0.2  # where the service gives no hint
AGAIN = (NotServing, QueueFull)  # errors that say: try the same again
REREAD = 0.1  # share of streams that are read once more after their end
KIND_CHARS = 60
THINK_S = 0.5  # at most, between two streams of a client
DETACH, CANCEL = "detach", "cancel"


@dataclass
class Tally:
    streams: Counter[str] = field(default_factory=Counter)  # that ended, by how
    errors: Counter[str] = field(default_factory=Counter)  # that clients were told, by kind
    retries: int = 0
    tokens: int = 0  # compared
    pieces: int = 0
    longest_first_s: float = 0.0  # from asking, or asking again, to the first piece: a queue is in it
    longest_pause_s: float = 0.0  # between two pieces of a stream: its request may have been preempted
    longest_standstill_s: float = 0.0  # between two pieces of anybody, while somebody reads: nothing moves
    violations: list[str] = field(default_factory=list)

    def longest(self) -> dict[str, float]:
        """For the record."""
        return {name: round(getattr(self, name), 1) for name in vars(self) if name.startswith("longest_")}


class Load:
    def __init__(self, book: Book, client: Callable[[int], AsyncClient], seed: int, tally: Tally) -> None:
        """`client`: of the service, the gateway of that number first. `tally` grows."""
        self.tally = tally
        self._book, self._client, self._seed = book, client, seed
        self._ending = asyncio.Event()
        self._busy = asyncio.Event()  # a piece came
        self._reading, self._moved = 0, 0.0  # streams, and when a piece of one came, or the first of them began

    def end(self) -> None:
        """No further streams; those that run go on to their end."""
        self._ending.set()

    async def flows(self, timeout_s: float) -> None:
        """Returns when a token comes to somebody. Raises TimeoutError."""
        self._busy.clear()
        async with asyncio.timeout(timeout_s):
            await self._busy.wait()

    async def run(self, users: int) -> None:
        """Until ended."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(users):
                tasks.create_task(self._user(number), name=f"user {number}")

    async def _user(self, number: int) -> None:
        random, count = Random(f"{self._seed} {number}"), 0
        sorts = [self._whole] * 7 + [self._moves, self._plain, self._cancels]
        async with self._client(number) as client:
            while not self._ending.is_set():
                text = random.choice(self._book.texts)
                tokens = math.ceil(len(text.tokens) * random.random() ** 2)  # more short ones than long ones
                ask = Ask(f"{self._seed}-{number}-{count}", text, max(1, tokens))
                count += 1
                try:
                    async with asyncio.timeout(STREAM_S):
                        await random.choice(sorts)(client, ask, random)
                except TimeoutError:
                    self.tally.streams["stuck"] += 1
                    self._violation(ask.id, f"not ended after {STREAM_S:g} s, with {len(ask.pieces)} pieces")
                except RequestError as error:
                    self.tally.streams["refused"] += 1
                    self._violation(ask.id, f"{error.code.name}: {error.message}")
                try:
                    async with asyncio.timeout(random.uniform(0, THINK_S)):
                        await self._ending.wait()
                except TimeoutError:
                    pass

    # ---- sorts of clients ----

    async def _whole(self, client: AsyncClient, ask: "Ask", random: Random) -> None:
        """Reads to the end; its client resumes by itself."""
        await self._read(client, ask, DETACH)
        self._check(ask)
        if random.random() < REREAD:
            await self._reread(client, ask, random)

    async def _moves(self, client: AsyncClient, ask: "Ask", random: Random) -> None:
        """Hangs up in the middle, and reads on from elsewhere."""
        await self._read(client, ask, DETACH, most=random.randint(1, ask.tokens))
        if not ask.ended:
            async with self._client(random.randrange(12)) as other:
                await self._read(other, ask, DETACH)
        self._check(ask)

    async def _plain(self, client: AsyncClient, ask: "Ask", random: Random) -> None:
        """Knows nothing of resuming: if its connection breaks, the request may be cancelled."""
        await self._read(client, ask, CANCEL)
        self._check(ask, may_be_cut=True)

    async def _cancels(self, client: AsyncClient, ask: "Ask", random: Random) -> None:
        """In the middle."""
        await self._read(client, ask, DETACH, most=random.randint(1, ask.tokens))
        if not ask.ended:
            await self._again(lambda: client.cancel(ask.id))
            await self._read(client, ask, DETACH)
        self._check(ask, may_be_cut=True)

    # ---- what they are made of ----

    async def _read(self, client: AsyncClient, ask: "Ask", on_disconnect: Any, most: int | None = None) -> None:
        """To the end, or to token `most`. Errors that say so are followed by another attempt under the same id."""

        async def attempt() -> None:
            resumes = ask.pieces and on_disconnect == DETACH
            if not resumes:
                self._start_over(ask)
            stream = client.resume(ask.id, ask.received) if resumes else client.generate(**ask.params(on_disconnect))
            await self._take(stream, ask, most)

        await self._again(attempt, ask)

    async def _take(self, stream: AsyncIterator[Chunk], ask: "Ask", most: int | None = None) -> None:
        clock = asyncio.get_running_loop().time
        tally, last, first = self.tally, clock(), True
        self._moved = self._moved if self._reading else last
        self._reading += 1
        try:
            async with aclosing(stream):  # type: ignore[type-var]
                async for chunk in stream:
                    ask.add(chunk)
                    tally.pieces += 1
                    self._busy.set()
                    now = clock()
                    if first:
                        tally.longest_first_s = max(tally.longest_first_s, now - last)
                    else:
                        tally.longest_pause_s = max(tally.longest_pause_s, now - last)
                    tally.longest_standstill_s = max(tally.longest_standstill_s, now - self._moved)
                    last, first, self._moved = now, False, now
                    if most is not None and ask.received >= most:
                        return
        finally:
            self._reading -= 1

    async def _again(self, attempt: Callable[[], Awaitable[None]], ask: "Ask | None" = None) -> None:
        """Raises RequestError if one says that trying again is of no use."""
        while True:
            try:
                return await attempt()
            except RequestError as error:
                self.tally.errors[kind(error)] += 1
                if isinstance(error, (Lost, BeyondEnd)) and ask is not None:
                    self._start_over(ask)  # that says: submit it again
                elif not isinstance(error, AGAIN):
                    raise
                self.tally.retries += 1
                await asyncio.sleep(error.retry_after_ms / 1000 or RETRY_S)

    async def _reread(self, client: AsyncClient, ask: "Ask", random: Random) -> None:
        """What has ended can be read again, from anywhere."""
        offset, again = random.randint(0, ask.received), Ask(ask.id, ask.text, ask.tokens)

        async def attempt() -> None:
            again.pieces.clear()
            await self._take(client.resume(ask.id, offset), again)

        await self._again(attempt)
        self.tally.streams["read again"] += 1
        self._judge(again, "read again: ", offset=offset)

    def _start_over(self, ask: "Ask") -> None:
        """What came so far was right, too."""
        self._judge(ask, "broken: ", broken=True)
        ask.pieces.clear()

    def _check(self, ask: "Ask", *, may_be_cut: bool = False) -> None:
        self.tally.streams[ask.pieces[-1].finish if ask.pieces else "nothing"] += 1
        self._judge(ask, may_be_cut=may_be_cut)

    def _judge(self, ask: "Ask", what: str = "", **exceptions: Any) -> None:
        self.tally.tokens += sum(len(piece.tokens) for piece in ask.pieces)
        for problem in problems(ask.pieces, ask.text.tokens[: ask.tokens], self._book.decode, **exceptions):
            self._violation(ask.id, what + problem)

    def _violation(self, request_id: str, problem: str) -> None:
        self.tally.violations.append(f"{request_id}: {problem}")


def kind(error: RequestError) -> str:
    """Its status, and the beginning of its words without the numbers."""
    words = re.sub(r"\d+", "N", error.message)
    return f"{error.code.name}: {words[:KIND_CHARS]}"


@dataclass
class Ask:
    """A request: the first `tokens` of a text. `pieces`: what came of it."""

    id: str
    text: Text
    tokens: int
    pieces: list[Piece] = field(default_factory=list)

    def params(self, on_disconnect: Any) -> dict[str, Any]:
        given = {"request_id": self.id, "max_tokens": self.tokens, "on_disconnect": on_disconnect}
        return self.text.params() | given

    def add(self, chunk: Chunk) -> None:
        finish = (chunk.final.finish_reason or "") if chunk.final else ""
        self.pieces.append(Piece(chunk.offset, tuple(chunk.token_ids), chunk.text, finish))

    @property
    def received(self) -> int:
        return self.pieces[-1].offset + len(self.pieces[-1].tokens) if self.pieces else 0

    @property
    def ended(self) -> bool:
        return bool(self.pieces) and self.pieces[-1].finish in (WHOLE, CANCELLED)
