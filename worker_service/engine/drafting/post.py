"""What a worker and its drafter elsewhere tell each other, as the worker's drafting sees it. How that travels is not
known here."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

from worker_service.engine.drafting.remote import Chain


class Truth(NamedTuple):
    """What the drafter is told of one request: see draft_link.proto, field by field."""

    handle: int
    start: int = 0
    tokens: Sequence[int] = ()
    need: int = 0
    ahead: int = 0
    fan: int = 0
    depth: int = 0
    salt: bytes = b""
    forget: bool = False


class Welcome(NamedTuple):
    """A drafter is there, and knows nothing yet. What it takes: requests, tokens of a chain and of a text, ids below
    `vocab_size`, guesses for each position. Seconds that it says a token takes it, and each further chain that grows at
    the same time."""

    handles: int
    longest_chain: int
    context_tokens: int
    vocab_size: int
    step_s: float = 0.0
    chain_s: float = 0.0
    widest_fan: int = 0


class Gone(NamedTuple):
    """It is not there any more."""


class Refused(NamedTuple):
    """It has no guesses for a handle: it lacks the text from `send_from` on, or, if that is None, has no room for
    it."""

    handle: int
    send_from: int | None = None


class Drafts(NamedTuple):
    """Chains by handle, and when they arrived, by the post's clock."""

    arrived_s: float
    chains: Sequence[tuple[int, Chain]]
    refused: Sequence[Refused] = ()


News: TypeAlias = Welcome | Gone | Drafts


class Post(Protocol):
    """The way to a drafter and back. Nothing here raises, and nothing but `receive` waits."""

    def now(self) -> float:
        """Seconds."""

    def send(self, rows: Sequence[Truth]) -> bool:
        """False: there is no room for it now, and nothing was sent."""

    def receive(self, wait_s: float) -> Sequence[News]:
        """What has come, in order; if nothing has, what comes first within `wait_s` seconds."""
