"""One request's answer on its way from the link to its client. Knows offsets and rounds; neither text nor RPC."""

import asyncio
from dataclasses import dataclass, field

from protos.errors import Lost, RequestError
from protos.v1 import gateway_link_pb2, types_pb2


@dataclass(slots=True)
class Batch:
    """All that came since the last one was taken. `start`: output tokens before it."""

    start: int
    tokens: list[int] = field(default_factory=list)
    rounds: list[types_pb2.Round] = field(default_factory=list)
    logprobs: list[types_pb2.Logprob] = field(default_factory=list)  # one a token, or none at all
    ending: gateway_link_pb2.Ending | None = None

    def skip(self, offset: int) -> list[int]:
        """Cut off what lies before output token `offset`, and return those tokens. A round that is cut stays one."""
        if offset <= self.start:
            return []
        skipped = self.tokens[: offset - self.start]
        self.start += len(skipped)
        self.tokens, self.logprobs = self.tokens[len(skipped) :], self.logprobs[len(skipped) :]
        left = len(self.tokens)
        for number in range(len(self.rounds) - 1, -1, -1):
            if left <= 0:
                self.rounds = self.rounds[number + 1 :]
                break
            self.rounds[number].tokens = min(self.rounds[number].tokens, left)
            left -= self.rounds[number].tokens
        return skipped


_FOLLOWING = -1


class Feed:
    """Deltas in, batches out. While the client is slow they grow into one batch: memory is bounded by max_tokens."""

    def __init__(self, submit: gateway_link_pb2.Submit, *, follows: bool = False, accepted: bool = False) -> None:
        """`follows`: a follow from the first token is under way, of a request that was there before."""
        self.submit = submit
        self.accepted = accepted
        self.abandoned = False  # nobody takes from it; it only waits to be acknowledged
        self.cancelled = False
        self.ended = False
        self.resumed = False  # it outlived a connection
        self.received = 0  # output tokens so far: the offset to follow from
        self._batch = Batch(0)
        # Set: a follow from `received` is under way; what came meanwhile, without what is to fill the gap, ends there.
        self._gap_end: int | None = _FOLLOWING if follows else None
        self._error: RequestError | None = None
        self._wake = asyncio.Event()
        self._decided = asyncio.Event()  # accepted, or failed
        if accepted:
            self._decided.set()

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def failed(self) -> bool:
        return self._error is not None

    def accept(self) -> None:
        self.accepted = True
        self._decided.set()

    async def until_accepted(self) -> None:
        """Returns once the request is durable. Raises RequestError if it never will be."""
        await self._decided.wait()
        if not self.accepted:
            assert self._error is not None
            raise self._error

    def put(self, delta: gateway_link_pb2.Delta) -> bool:
        """Take a delta in; what was seen before is cut off. Returns False on a gap: then follow from `received`.

        A second gap ends the feed with Lost. Deltas that were already on their way behind the first are no second one.
        """
        end = delta.start + len(delta.tokens)
        if delta.start > self.received:
            return self._gap(delta.start, end)
        self._gap_end = None if delta.tokens or delta.HasField("ending") else self._gap_end
        new = delta.tokens[self.received - delta.start :]
        if new:
            self._batch.tokens.extend(new)
            self._batch.logprobs.extend(delta.logprobs.tokens[self.received - delta.start :])
            self._batch.rounds.append(types_pb2.Round(tokens=len(new), drafted=delta.drafted, accepted=delta.accepted))
            self.received = end
        if delta.HasField("ending"):
            self._batch.ending = delta.ending
            self.ended = True
        if new or delta.HasField("ending"):
            self._wake.set()
        return True

    def _gap(self, start: int, end: int) -> bool:
        if self._gap_end is None:
            self._gap_end = end
            return False
        if self._gap_end in (start, _FOLLOWING):
            self._gap_end = end
        else:
            self.fail(Lost(f"output tokens {self.received} to {start} are missing"))
        return True

    def on_new_link(self) -> None:
        """What was on its way on the old one never comes."""
        self.resumed = True
        self._gap_end = None

    def fail(self, error: RequestError) -> None:
        """End the feed: what is already here is still taken first."""
        self._error = self._error or error
        self._decided.set()
        self._wake.set()

    async def take(self) -> Batch:
        """The next batch, with at least one token or the ending. Raises RequestError once the feed has failed."""
        await self._wake.wait()
        self._wake.clear()
        batch, self._batch = self._batch, Batch(self.received)
        if not batch.tokens and batch.ending is None:
            assert self._error is not None
            raise self._error
        if self._error is not None:
            self._wake.set()
        return batch
