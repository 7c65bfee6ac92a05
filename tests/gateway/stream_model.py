"""Models of the scheduler and of clients, as a gateway sees them, for test_stream_machine.py. No assertions live
here."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gateway.feed import Feed
from protos.errors import DuplicateRequest, NotServing, RequestError, UnknownRequest
from protos.idempotence import content
from protos.link.v1 import gateway_link_pb2 as pb
from protos.v1 import types_pb2
from tests.gateway.harness import ending

T = TypeVar("T")
CANCEL, DETACH = types_pb2.ON_DISCONNECT_CANCEL, types_pb2.ON_DISCONNECT_DETACH


@dataclass
class Request:
    """One that the scheduler knows. Its output token number n is n."""

    submit: pb.Submit
    stored: bool = False
    rounds: list[int] = field(default_factory=list)  # tokens of each
    ended: bool = False
    followed: bool = False  # by this gateway


class Scheduler:
    """As the scheduler answers: in order, one message after the other."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.cancelled: set[str] = set()
        self.unheard: list[pb.FromGateway] = []
        self.unsaid: list[pb.ToGateway] = []
        # What new submissions are refused with; NotServing: also requests that it would have to look up in its store.
        self.mood: RequestError | None = None

    def hear(self) -> None:
        message = self.unheard.pop(0)
        match message.WhichOneof("kind"):
            case "submit":
                self._submitted(message.submit)
            case "follow":
                self._followed(message.follow)
            case "follows":
                for follow in message.follows.follow:
                    self._followed(follow)
            case "cancel":
                self.cancelled.add(message.cancel.request_id)
                if (known := self.requests.get(message.cancel.request_id)) and known.stored:
                    self.end(known)

    def _submitted(self, submit: pb.Submit) -> None:
        known = self.requests.get(submit.request_id)
        if self.mood is not None and (known is None or self._away(known)):
            self._refuse(submit.request_id, self.mood)
        elif known is None:
            self.requests[submit.request_id] = Request(submit, followed=True)
        elif content(known.submit) != content(submit):
            known.followed = False
            self._refuse(submit.request_id, DuplicateRequest("taken"))
        else:
            if known.stored:
                self.unsaid.append(pb.ToGateway(accepted=[submit.request_id]))
            self._followed(pb.Follow(request_id=submit.request_id))

    def _away(self, known: Request) -> bool:
        return known.ended and isinstance(self.mood, NotServing)

    def _refuse(self, id: str, error: RequestError) -> None:
        refusal = pb.Refusal(request_id=id, code=error.code.value[0], retry_after_s=error.retry_after_ms / 1000)
        self.unsaid.append(pb.ToGateway(refusals=[refusal]))

    def _followed(self, follow: pb.Follow) -> None:
        if (known := self.requests.get(follow.request_id)) is None:
            self._refuse(follow.request_id, UnknownRequest("unknown"))
            return
        if self.mood is not None and self._away(known):
            self._refuse(follow.request_id, self.mood)
            return
        start = 0
        for tokens in known.rounds:
            if follow.most_tokens and start >= follow.offset + follow.most_tokens:
                return
            if start + tokens > follow.offset:
                self._say(known, start, tokens)
            start += tokens
        known.followed = True
        if known.ended:
            self._say(known, start, 0)

    def _say(self, known: Request, start: int, tokens: int) -> None:
        id, end = known.submit.request_id, None if tokens else ending()
        delta = pb.Delta(request_id=id, start=start, tokens=range(start, start + tokens), ending=end)
        self.unsaid.append(pb.ToGateway(deltas=[delta]))

    def store(self, known: Request) -> None:
        if not known.stored:
            known.stored = True
            if known.followed:
                self.unsaid.append(pb.ToGateway(accepted=[known.submit.request_id]))

    def run(self, known: Request, tokens: int) -> None:
        if known.stored and not known.ended:
            known.rounds.append(tokens)
            if known.followed:
                self._say(known, sum(known.rounds) - tokens, tokens)

    def end(self, known: Request) -> None:
        if known.stored and not known.ended:
            known.ended = True
            if known.followed:
                self._say(known, sum(known.rounds), 0)

    def hang_up(self) -> None:
        self.unheard.clear()
        self.unsaid.clear()
        for known in self.requests.values():
            known.followed = False

    def restart(self) -> None:
        self.hang_up()
        self.requests = {id: known for id, known in self.requests.items() if known.stored}


@dataclass
class Client:
    feed: Feed
    tokens: int = 0
    ended: int = 0
    error: BaseException | None = None
    gone: bool = False
    taking: "asyncio.Task[Any] | None" = None

    @property
    def done(self) -> bool:
        return self.gone or bool(self.ended) or self.error is not None


def submission(id: str, detached: bool, prompt: int) -> pb.Submit:
    return pb.Submit(request_id=id, prompt=[prompt], on_disconnect=DETACH if detached else CANCEL)


async def called(act: Callable[..., T], *arguments: Any) -> T:
    """Where the event loop runs."""
    return act(*arguments)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
