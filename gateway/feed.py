"""One request's answer on its way from the link to its client. Knows offsets and rounds; neither text nor RPC."""

import asyncio
from dataclasses import dataclass, field
from math import inf

from protos.errors import Lost, NotServing, RequestError
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
MOST_UNREAD = 1024  # tokens
BEYOND = 2**32 - 1  # every answer's end


class Feed:
    """Deltas in, batches out. While the client is slow they grow into one batch. Once that has `most` tokens the feed
    is `behind`: what comes is dropped, and followed again from `received` when the batch was taken. So it is after
    `most` tokens of a follow, which ends there."""

    def __init__(
        self, submit: gateway_link_pb2.Submit, *, follows: bool = False, accepted: bool = False, most: int = MOST_UNREAD
    ) -> None:
        """`follows`: a follow from the first token is under way, of a request that was there before."""
        self.submit = submit
        self.behind = False
        self.left = False  # nobody takes from it any more; only its end matters
        self._over = False  # it is behind, and has ended
        self.most = most
        self._until = float(most) if follows else inf  # output tokens that come without another follow
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

    @property
    def forsaken(self) -> bool:
        """The service could not go on with it; its client is there still."""
        return isinstance(self._error, NotServing)

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
        if self.left or self.behind:
            self._over = self._over or delta.HasField("ending")
            self.ended = self.left and self._over
            return True
        if delta.start > self.received:
            return self._gap(delta.start, end)
        self._gap_end = None if delta.tokens or delta.HasField("ending") else self._gap_end
        new = delta.tokens[self.received - delta.start :]
        if new:
            self._batch.tokens.extend(new)
            self._batch.logprobs.extend(delta.logprobs.tokens[self.received - delta.start :])
            self._batch.rounds.append(types_pb2.Round(tokens=len(new), drafted=delta.drafted, accepted=delta.accepted))
            self.received = end
            self.behind = end >= self._until or len(self._batch.tokens) >= self.most
        if self.behind:
            self._over = delta.HasField("ending")
        elif delta.HasField("ending"):
            self._batch.ending = delta.ending
            self.ended = True
        if new or self.ended:
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

    def catch_up(self) -> bool:
        """Whether it has to be followed before anything comes again."""
        if not self.behind or self._batch.tokens or self.failed:
            return False
        self.behind, self._gap_end = False, _FOLLOWING
        return True

    def follow(self) -> gateway_link_pb2.Follow:
        """What to ask for: nothing but the end, if that is all that matters."""
        if self.left:
            return gateway_link_pb2.Follow(request_id=self.request_id, offset=BEYOND)
        self._until = self.received + self.most
        return gateway_link_pb2.Follow(request_id=self.request_id, offset=self.received, most_tokens=self.most)

    @property
    def bounded(self) -> bool:
        """It was followed, so what comes for it may stop before its end."""
        return self._until < inf

    def leave(self) -> None:
        """Nobody takes from it any more."""
        self.left, self.ended = True, self.ended or self._over
        self._batch = Batch(self.received)

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
