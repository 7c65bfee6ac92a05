"""One answer on its way to one client: chunks of text as they come, until a deadline, and no longer than the client
reads. How a chunk travels is the business of the doors; no transport lives here."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from gateway.chunk import Chunk
from gateway.detokenizer import TOKENS_AT_ONCE
from gateway.feed import Batch, Feed
from gateway.link import Link
from gateway.metrics import Metrics
from gateway.stream_states import Life
from gateway.text import TextModel
from protos.errors import BeyondEnd, DeadlinePassed, Failed, QueueFull
from protos.link.v1 import common_pb2
from protos.v1 import types_pb2

_WHOLE = (types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH)


class Stream:
    """The answer of one request, from output token `offset` on. `Front` opens and closes it.

    `request_id`, `model` and `prompt_tokens` tell what is answered."""

    def __init__(
        self,
        feed: Feed,
        model: TextModel,
        *,
        link: Link,
        metrics: Metrics,
        offset: int,
        timeout_s: float,
        stalled_s: float,
        count_stalled: Callable[[int], None],
    ) -> None:
        """`timeout_s`: the answer must be whole by then; `stalled_s`: a client that reads nothing for so long is cut
        off. `count_stalled` gets 1 when that happens, and -1 when the client has read on."""
        self.request_id, self.model = feed.request_id, model
        self.prompt_tokens = len(feed.submit.prompt)
        self._counted = not feed.life.accepted  # else another call has submitted the request
        self.answer = metrics.answer(counted=self._counted)
        limits = feed.submit.limits
        self._detokenizer = model.detokenizer(limits.stop, limits.min_tokens)
        self.before: list[str] = []  # the text before `offset`, once there is a chunk
        self._told: common_pb2.Logprobs | None = None  # of the prompt, for an answer without output
        self._feed, self._link, self._metrics = feed, link, metrics
        self._offset, self._stalled_s = offset, stalled_s
        self._count_stalled = count_stalled
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + timeout_s
        late = DeadlinePassed(f"not finished within {round(timeout_s, 2):g} s")
        self._expiry = self._loop.call_at(self._deadline, feed.fail, late)
        self._patience: asyncio.TimerHandle | None = None
        self._written_since: float | None = None
        self._cut = False  # the client read too little for too long

    @property
    def structure(self) -> types_pb2.Structure:
        """The form that the answer must have."""
        return self._feed.submit.sampling.structure

    async def accepted(self) -> None:
        """Return once the request is durable. Raises RequestError if it never will be."""
        await self._feed.until_accepted()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """The chunks; the last one has `final`. The text before `offset` is made too: the rest depends on it. Raises
        RequestError."""
        detokenizer = self._detokenizer
        while self.answer.ending is None:
            batch = await self._link.take(self._feed)
            if batch.prompt is not None:
                self._check(batch.prompt)
            if self._feed.about_prompt and self._feed.submit.limits.max_tokens == 0:
                self._keep_to_itself(batch)
            self.answer.add(batch)
            if batch.start < self._offset:
                self.before.append(await detokenizer.push_in_turns(batch.skip(self._offset)))
            if not batch.tokens and batch.ending is None:
                continue
            failure = self.answer.failure
            if batch.start < self._offset:
                beyond = f"offset: the answer ended at token {batch.start}, and {self._offset} is beyond it"
                raise failure or BeyondEnd(beyond)
            few = len(batch.tokens) <= TOKENS_AT_ONCE
            text = detokenizer.push(batch.tokens) if few else await detokenizer.push_in_turns(batch.tokens)
            chunk = self._chunk(batch, text)
            if batch.ending is not None:
                chunk.text += detokenizer.finish()
                if failure is None:
                    chunk.final = self.answer.final(self.prompt_tokens)
            if chunk.text or chunk.token_ids or chunk.final is not None:
                yield chunk
            if failure is not None:
                raise failure
        if self._counted:
            self._metrics.finished(self.answer, self.prompt_tokens)

    def _check(self, told: common_pb2.Logprobs | None) -> None:
        asked = self._feed.submit.sampling
        scores = self.prompt_tokens - 1 if asked.HasField("prompt_logprobs") else 0
        if told is None or len(told.prompt) != scores or (asked.embedding and not told.embedding):
            raise Failed("its worker did not tell what was asked of the prompt: it may be of an older version")

    def _keep_to_itself(self, batch: Batch) -> None:
        """Of an answer without output: the token that was drawn is left out, and all comes at the end."""
        self._told = batch.prompt or self._told
        batch.start, batch.tokens, batch.logprobs = 0, [], []
        batch.rounds = [each._replace(tokens=0) for each in batch.rounds]
        batch.prompt = self._told if batch.ending is not None else None
        if batch.ending is not None and batch.ending.finish_reason in _WHOLE:
            self._check(self._told)
            batch.ending.finish_reason = types_pb2.FINISH_REASON_LENGTH

    def _chunk(self, batch: Batch, text: str) -> Chunk:
        chunk = Chunk(self.request_id, text, batch.tokens, batch.start, batch.rounds, batch.logprobs)
        if batch.prompt is not None:
            submit = self._feed.submit
            chunk.prompt_token_ids = submit.prompt if submit.sampling.HasField("prompt_logprobs") else ()
            chunk.prompt_logprobs, chunk.embedding = batch.prompt.prompt, batch.prompt.embedding
        return chunk

    def write_at_once(self, ready: Callable[[], bool], write: Callable[[Chunk], None]) -> None:
        """From here on a chunk that comes while the iteration waits for one goes to `write`, where `ready()` says that
        its client reads; the iteration does not see it, and waits on. It sees the last chunk, very long ones, and those
        that tell of the prompt."""

        add, push = self.answer.add, self._detokenizer.push

        def take(batch: Batch) -> bool:
            long = len(batch.tokens) > TOKENS_AT_ONCE or batch.prompt is not None
            if batch.start < self._offset or long or not ready():
                return False
            add(batch)
            text = push(batch.tokens)
            write(Chunk(self.request_id, text, batch.tokens, batch.start, batch.rounds, batch.logprobs))
            return True

        self._feed.taker = take

    @asynccontextmanager
    async def writing(self, chunk: Chunk) -> AsyncIterator[None]:
        """The block writes `chunk` to the client. While the client does not read, the transport takes no more and the
        block waits. If that lasts too long the stream is left. The client hears of it when it reads again: no error can
        overtake the chunk, and the chunk cannot be taken back. Raises QueueFull, or what else the client was to be
        told, unless it was the last chunk."""
        self._written_since = self._loop.time()
        if self._patience is None:  # one timer serves many chunks: most are written at once
            self._patience = self._loop.call_at(self._patient_until(), self._lose_patience)
        try:
            yield
        finally:
            self._written_since = None
            if self._cut:
                self._count_stalled(-1)
        if self._cut and self.answer.ending is None:  # behind the last chunk nothing is lost
            more = f"Resume goes on from token {chunk.offset + len(chunk.token_ids)}"
            unread = f"nothing was read for {self._stalled_s:g} s; {more}, if it was to run on"
            raise self._feed.error or QueueFull(unread)

    def _patient_until(self) -> float:
        until = (self._written_since or self._loop.time()) + self._stalled_s
        return until if self._feed.life is Life.ENDED else min(until, self._deadline)  # what is whole may be read later

    def _lose_patience(self) -> None:
        """The write that is under way may have begun after the timer did."""
        self._patience = None
        if self._written_since is None:
            return
        if self._loop.time() < (until := self._patient_until()):
            self._patience = self._loop.call_at(until, self._lose_patience)
            return
        self._link.leave(self._feed)
        self._cut = True
        self._count_stalled(1)

    def close(self) -> dict[str, Any]:
        """The client takes no more. Returns a summary for the log."""
        self._expiry.cancel()
        if self._patience is not None:
            self._patience.cancel()
        self._link.leave(self._feed)
        return self.answer.summary()
