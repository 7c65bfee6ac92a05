"""What each gateway is to be told. Nothing here waits for a gateway, and nothing sends."""

import asyncio
from collections import deque
from collections.abc import Callable

from protos.errors import RequestError
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as pb
from protos.models import digest
from scheduler_service.store.rounds import LoggedRound

MAX_PENDING = 16_384  # items for one gateway; one that reads more slowly is cut off, and follows again by offset
MAX_ITEMS = 4096  # in one message, which keeps it far below the size that gRPC accepts
ITEM_BYTES = 4096  # of log-probabilities: more count as several items


class GatewayOutbox:
    """The messages for one gateway. Everything that one step brings goes into one message."""

    def __init__(self, wants_load: bool = False, has_model: str = "") -> None:
        """`has_model`: the digest of the model that the gateway has."""
        self.wants_load = wants_load
        self._load = pb.Load()  # that it was told last
        self._counted = False  # requests of this gateway were taken or refused since then
        self.follows: set[str] = set()  # requests whose output goes to this gateway
        self.gone = False  # nobody takes from it any more
        self._model: common_pb.ModelInfo | None = None
        self._refuses = False
        self._sent = has_model  # the digest of the model that the gateway was sent, or has
        self._messages = deque([pb.ToGateway()])  # the last one grows
        self._items = 0  # in the last message
        self._pending = 0
        self.filled = asyncio.Event()  # there is a message
        self._overflowed = asyncio.Event()

    def accepted(self, id: str) -> None:
        """The request is durable."""
        self._counted = True
        self._put().accepted.append(id)

    def refuse(self, id: str, error: RequestError) -> None:
        self._counted = True
        self._put().refusals.add(
            request_id=id, code=error.code.value[0], message=error.message, retry_after_s=error.retry_after_ms / 1000
        )

    def round(self, id: str, round: LoggedRound, ending: bytes | None = None, *, counted: bool = True) -> None:
        """A round that is durable now. `ending`: a serialized Ending, if it was the last one. `counted`: as one of
        MAX_PENDING, which is not for rounds that the gateway asked for again."""
        delta = self._put(1 + len(round.logprobs) // ITEM_BYTES, counted).deltas.add()
        delta.request_id = id  # one by one: arguments of `add` cost more, and this is done for every row
        delta.start = round.start
        delta.tokens.extend(round.tokens)
        delta.drafted = round.drafted
        delta.accepted = round.accepted
        if round.logprobs:
            delta.logprobs.MergeFromString(round.logprobs)
        if ending is not None:
            delta.ending.MergeFromString(ending)
            self.follows.discard(id)

    def ending(self, id: str, start: int, ending: bytes) -> None:
        """Without tokens. `start`: all tokens of the output."""
        self._put().deltas.add(request_id=id, start=start).ending.MergeFromString(ending)
        self.follows.discard(id)

    def serving(self, model: common_pb.ModelInfo | None, *, refuses: bool = False) -> None:
        """Whether the service is ready: if it has a model that workers run, and the store takes what is new."""
        self._model, self._refuses = model, refuses
        self._say_serving()

    def _say_serving(self) -> pb.Serving:
        serving = self._put().serving
        serving.ready, serving.refuses = self._model is not None, self._refuses
        return serving

    def load(self, load: pb.Load) -> None:
        """How long a new request would wait. Nothing is said of what has not changed, unless requests came from there
        and are over: the gateway still adds them."""
        if load != self._load or self._counted:
            self._load, self._counted = load, False
            self._say_serving().load.CopyFrom(load)

    def unsent_model(self, message: pb.ToGateway) -> common_pb.ModelInfo | None:
        """The model that has to go with `message`; None if it says nothing of the service, or the gateway has it."""
        model = self._model
        if model is None or not message.serving.ready:
            return None
        if self._sent == (told := digest(model)):
            return None
        self._sent = told
        return model

    def _put(self, items: int = 1, counted: bool = True) -> pb.ToGateway:
        self._pending += items * counted
        if self._pending > MAX_PENDING:
            self._overflowed.set()
        self.filled.set()
        self._items += items
        if self._items > MAX_ITEMS:
            self._messages.append(pb.ToGateway())
            self._items = items
        return self._messages[-1]

    def take(self) -> pb.ToGateway:
        """The next message; an empty one if nothing is to be said."""
        message = self._messages.popleft()
        if not self._messages:
            self._messages.append(pb.ToGateway())
            self._items = self._pending = 0
            self.filled.clear()
        return message

    async def overflow(self) -> None:
        """Returns once more than MAX_PENDING items waited: the gateway reads too slowly."""
        await self._overflowed.wait()


class Outboxes(set[GatewayOutbox]):
    """One for each gateway that is linked."""

    def __init__(self) -> None:
        super().__init__()
        self.one_model = asyncio.Lock()  # held while a message gets its copy of the model
        self._model: common_pb.ModelInfo | None = None
        self._refuses = False

    def link(self, outbox: GatewayOutbox) -> None:
        """A gateway has come."""
        self.add(outbox)
        outbox.serving(self._model, refuses=self._refuses)

    def announce(self, model: common_pb.ModelInfo | None) -> None:
        """As GatewayOutbox.serving, to every gateway."""
        self._model = model
        for outbox in self:
            outbox.serving(model, refuses=self._refuses)

    def refuses(self, refuses: bool) -> None:
        """Whether the store refuses what is new."""
        if refuses != self._refuses:
            self._refuses = refuses
            self.announce(self._model)

    def tell_load(self, load: Callable[[], pb.Load]) -> None:
        """To those that choose between cells. `load` is asked only if there are any."""
        if told := [outbox for outbox in self if outbox.wants_load]:
            now = load()
            for outbox in told:
                outbox.load(now)
