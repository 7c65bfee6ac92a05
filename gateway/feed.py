"""One client's stream of a request: its state, and the buffer of output that its client has not taken yet.

The tables of stream_states.py decide; a Feed holds the state, the buffer and the offsets, and words the messages that
the tables ask for. It sends nothing itself, and knows neither text nor RPC.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from gateway.chunk import Round
from gateway.stream_states import FLOW, LIFE, Act, Event, Flow, Life, Step, after
from protos.errors import Lost, RequestError
from protos.link.v1 import common_pb2
from protos.link.v1 import gateway_link_pb2 as pb
from protos.v1 import types_pb2

MOST_UNREAD = 1024  # tokens
BEYOND = 2**32 - 1  # an offset behind the end of every answer: a follow from there brings the end alone
# So often a follow of one stream leaves a gap in the others of its request: where the answer begins beyond what they
# have, and where new tokens begin beyond the answer's end.
JUMPS_OF_A_FOLLOW = 2


@dataclass(slots=True)
class Batch:
    """All that has come since the client last took something. `start`: number of output tokens before it."""

    start: int
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    logprobs: list[types_pb2.Logprob] = field(default_factory=list)  # one for each token, or none at all
    prompt: common_pb2.Logprobs | None = None  # with the first token, if something was asked of the prompt
    ending: pb.Ending | None = None

    def skip(self, offset: int) -> list[int]:
        """Cut off the tokens before output token `offset`, and return them. A round that is cut stays one round."""
        if offset <= self.start:
            return []
        skipped = self.tokens[: offset - self.start]
        self.start += len(skipped)
        self.prompt = None
        self.tokens, self.logprobs = self.tokens[len(skipped) :], self.logprobs[len(skipped) :]
        uncounted = len(self.tokens)
        for number in range(len(self.rounds) - 1, -1, -1):
            if uncounted <= 0:
                self.rounds = self.rounds[number + 1 :]
                break
            kept = min(self.rounds[number].tokens, uncounted)
            self.rounds[number] = self.rounds[number]._replace(tokens=kept)
            uncounted -= kept
        return skipped


class Feed:
    """`on` and `put` return the messages that are to be sent to the scheduler, in order.

    The buffer holds `most` tokens, and a follow asks for as many. Tokens that come while it is full are dropped. Once
    the client has read the buffer, the scheduler is asked for them again, from `received` on. So a client that does not
    read costs little memory.
    """

    def __init__(
        self,
        submit: pb.Submit,
        *,
        accepted: bool = False,
        most: int = MOST_UNREAD,
        link_number: int = 0,
    ) -> None:
        """`accepted`: the scheduler is known to have the request. `link_number`: of the link
        that was up when the stream began."""
        self.submit = submit
        self._deadline = time.monotonic() + submit.timeout_s if submit.HasField("timeout_s") else None
        self.link_number = link_number
        self.asked_later = False  # it was refused for now, and is asked for again after a while
        self.life = Life.ACCEPTED if accepted else Life.SUBMITTED
        self.flow = Flow.FLOWING
        self.received = 0  # output tokens so far; a follow goes on from here
        self.stray_jumps = 0  # how often tokens may yet come ahead because another stream of this request followed it
        # Whether something is asked of the prompt: it comes with the first token.
        self.about_prompt = submit.sampling.HasField("prompt_logprobs") or submit.sampling.embedding
        self._most = most
        self._until = inf  # output tokens that come without another follow
        self._ahead: int | None = None  # while FILLING: where the next token ahead is expected; None: anywhere
        self._batch = Batch(0)
        self.error: RequestError | None = None  # what the client is told once it has taken what is in the buffer
        # News for `take`, and who waits for them there: an asyncio.Event costs three times as much, for every chunk.
        self._news = False
        self._waiter: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Takes a batch at once, and returns whether it did: a task that has to be woken costs several times as much.
        self.taker: Callable[[Batch], bool] | None = None
        self._decided = asyncio.Event()  # the scheduler has acknowledged the request, or never will
        if accepted:
            self._decided.set()

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    def submission(self) -> pb.Submit:
        """The submission as it is sent now, with the time that remains until its deadline."""
        if self._deadline is not None:
            self.submit.timeout_s = max(0.0, self._deadline - time.monotonic())
        return self.submit

    def on(self, event: Event, error: RequestError | None = None) -> list[pb.FromGateway]:
        """`error`: what the client is told, after what is in the buffer. Raises IllegalEvent."""
        life, acts = after(LIFE, self.life, event)
        if event in (Event.LINK, Event.DISPLACE):  # from here on nothing comes that is not asked for
            self._until = inf if Act.SUBMIT in acts else 0
        if Act.FOLLOW in acts:
            acts = tuple(own for act in acts for own in (self._step(Step.ASK) if act is Act.FOLLOW else (act,)))
        self.life = life
        if error is not None:
            self.fail(error)
        if life.accepted or not life.live:
            self._decided.set()
        return self._messages(acts)

    def put(self, delta: pb.Delta) -> list[pb.FromGateway]:
        """Take in the output of one round. Tokens that came before are cut off."""
        if not self.life.accepted:
            return []  # it belongs to another request that had this id before; ours is acknowledged before its output
        if not self.life.read:
            return self.on(Event.END) if delta.HasField("ending") else []
        messages: list[pb.FromGateway] = []
        start = delta.start
        if ahead := start > self.received:
            messages = self._messages(self._jump(start, start + len(delta.tokens)))
        elif new := delta.tokens[self.received - start :]:
            full = self.received + len(new) >= self._until or len(self._batch.tokens) + len(new) >= self._most
            if Act.KEEP in self._step(Step.FILL if full else Step.NEXT):
                self._keep(new, delta)
        if delta.HasField("ending") and Act.KEEP in self._step(Step.END_AHEAD if ahead else Step.END):
            self._batch.ending = delta.ending
            self._tell()
            messages += self.on(Event.END)
        return messages

    def _keep(self, new: Sequence[int], delta: pb.Delta) -> None:
        batch = self._batch
        batch.tokens += new
        batch.rounds.append(Round(len(new), delta.drafted, delta.accepted))
        if delta.HasField("logprobs"):
            batch.logprobs += delta.logprobs.tokens[self.received - delta.start :]
        if self.about_prompt and not self.received:
            batch.prompt = delta.logprobs
        self.received += len(new)
        self._tell()

    def _jump(self, start: int, end: int) -> tuple[Act, ...]:
        """Tokens from `start` to `end` came, but those from `received` to `start` did not. While a follow is under way
        that is expected of new tokens, which continue the last ones that came ahead, and of answers to other streams of
        this request. Otherwise the tokens in between are lost."""
        expected = self.flow is not Flow.FILLING or self._ahead in (None, start)
        if not expected and self.stray_jumps:
            self.stray_jumps -= 1
            expected = True
        acts = self._step(Step.AHEAD if expected else Step.MISS)
        self._ahead = end
        if not expected:
            self.fail(Lost(f"output tokens {self.received} to {start} are missing"))
        return acts

    def _step(self, step: Step) -> tuple[Act, ...]:
        self.flow, acts = after(FLOW, self.flow, step)
        if Act.FOLLOW in acts:
            self._ahead = None
        return acts

    def _messages(self, acts: Iterable[Act]) -> list[pb.FromGateway]:
        return [message for act in acts if (message := self._message(act)) is not None]

    def _message(self, act: Act) -> pb.FromGateway | None:
        id = self.request_id
        match act:
            case Act.SUBMIT:
                return pb.FromGateway(submit=self.submission())
            case Act.CANCEL:
                return pb.FromGateway(cancel=pb.Cancel(request_id=id))
            case Act.FOLLOW:
                self._until = self.received + self._most
                return pb.FromGateway(follow=pb.Follow(request_id=id, offset=self.received, most_tokens=self._most))
            case Act.FOLLOW_END if self._until < inf:  # else the end comes by itself
                return pb.FromGateway(follow=pb.Follow(request_id=id, offset=BEYOND))
        return None

    def fail(self, error: RequestError) -> None:
        """The client is told of the first such error, once it has taken what is in the buffer."""
        self.error = self.error or error
        self._decided.set()
        self._tell()

    async def until_accepted(self) -> None:
        """Return once the request is durable. Raises RequestError if it never will be."""
        await self._decided.wait()
        if self.error is not None and not self._batch.tokens:
            raise self.error

    def want(self) -> list[pb.FromGateway]:
        """The client waits for more: if the buffer was full, there is room again."""
        if self.flow is Flow.FLOWING or self._batch.tokens or not (self.life.accepted and self.life.read):
            return []
        return self._messages(self._step(Step.DRAINED))

    def _tell(self) -> None:
        self._news = True
        if self.taker is None or self.error is not None or self._batch.ending is not None:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def hand_over(self) -> list[pb.FromGateway]:
        """Give the tokens that have come to the `taker`, if there is one and `take` waits; else `take` returns them. To
        be called after `put`. Returns what is to be sent. `take` raises what the taker raises."""
        if self.taker is None or not self._news or self._waiter is None or self._waiter.done():
            return []
        batch, self._batch = self._batch, Batch(self.received)
        try:
            taken = self.taker(batch)
        except Exception as error:
            self._waiter.set_exception(error)
            return []
        if taken:
            self._news = False
            return self.want()
        self._batch = batch
        self._wake()
        return []

    async def take(self) -> Batch:
        """The next batch, with at least one token or the ending. One at a time may wait. Raises RequestError once the
        stream has failed."""
        if not self._news:
            self._loop = self._loop or asyncio.get_running_loop()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._news = False
        batch, self._batch = self._batch, Batch(self.received)
        if not batch.tokens and batch.ending is None:
            assert self.error is not None
            raise self.error
        if self.error is not None:
            self._tell()
        return batch

    def drop(self) -> None:
        """Nobody takes from the buffer any more. A request that runs on keeps nothing of its client's connection."""
        self._batch, self.taker = Batch(self.received), None
