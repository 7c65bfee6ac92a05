"""The data of the core, and the answers that it gives: requests, effects, plans. Plain data; no behaviour of note.

Times are seconds, sizes tokens or blocks. Nothing here holds the true output length of a request.
"""

from dataclasses import dataclass
from enum import Enum, IntEnum
from math import inf
from typing import NamedTuple, Protocol

from scheduler_service.core.beliefs import Acceptance, Expected, Length
from scheduler_service.core.lifecycle import State
from scheduler_service.core.value import value


class RequestClass(IntEnum):
    """Served in this order, but for the least share of each (core/classes.py)."""

    INTERACTIVE = 1
    DEFAULT = 2
    BATCH = 3


class Finish(Enum):
    """Why the worker ended a request."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Request:
    id: str
    arrival: float
    prompt_tokens: int
    max_tokens: int
    klass: RequestClass = RequestClass.DEFAULT
    deadline: float | None = None
    predicted_tokens: int | None = None  # the client's hint
    expected: Expected | None = None  # what a predictor said at its submission
    tenant: str = ""

    @property
    def most_tokens(self) -> int:
        """That it may come to: prompt and output."""
        return self.prompt_tokens + self.max_tokens

    @property
    def foreseen(self) -> bool:
        """Whether a predictor has told both its length and its acceptance; of others only their drafts count then."""
        told = self.expected
        return self.predicted_tokens is None and told is not None and None not in (told.length, told.acceptance)


# ---- effects: what the shell has to store and to tell ----


@value
class Record:
    """Everything about a request that outlives a scheduler. `Core.restore` takes it back."""

    request: Request
    state: State
    placement: int
    emitted: int
    prefilled: int
    acceptance: Acceptance
    perceptible: bool
    level: int
    key: float
    preemptions: int
    started: float | None
    deaths: int = 0  # of workers that ran it alone, one after the other
    probation: int = 0  # rounds until it is no longer suspected of such a death


@value
class Changed:
    """Its record changed, no tokens were emitted."""

    record: Record


@value
class Advanced:
    """A round of it counts, and its record changed. `start`: where the round's tokens begin in the output."""

    record: Record
    start: int


@value
class WentOn:
    """Rounds of these requests count, and brought tokens. Since the record that was last made of each, nothing of it
    has changed but output, acceptance and key. A row of a report that has neither this effect nor another with a
    `start` was stale: its tokens must be dropped."""

    ids: tuple[str, ...]


@value
class Ended:
    """The last that is heard of it. With a round of its own, `start` says where that round's tokens begin. `reason`: a
    sentence for its client, if it failed for something that no row tells."""

    record: Record
    finish: Finish | None
    start: int | None = None
    reason: str = ""

    @property
    def cut(self) -> bool:
        """Whether its bound ended it: else it would have been longer."""
        return self.finish is Finish.LENGTH and self.record.emitted >= self.record.request.max_tokens

    @property
    def teaches(self) -> bool:
        """Whether its length and its drafts tell something of other requests: not where it asked for one token."""
        return self.record.request.max_tokens > 1


Effect = Changed | Advanced | WentOn | Ended


def counted_ids(effect: Effect) -> tuple[str, ...]:
    """The requests of which this effect says that a round of the report counts."""
    if isinstance(effect, WentOn):
        return effect.ids
    return () if isinstance(effect, Changed) or effect.start is None else (effect.record.request.id,)


# ---- decisions ----


@value
class Run:
    id: str
    placement: int
    draft_len: int
    prefill_tokens: int
    here: bool = False  # its drafts are not made elsewhere: others get the chains (core/elsewhere.py)
    yields: bool = False  # while its drafts are on their way, the next request that is ready may go first, once


@value
class Plan:
    """Desired state of one worker: its `schedule`, best first, longer than its slots, so that vacant places fill
    themselves. KV of the requests in `drop` is dropped, and that of those in `offload` goes to the host's memory, since
    others need the room. The worker may forget the requests `to_forget`: they have ended or moved since its last
    plan."""

    schedule: tuple[Run, ...]
    drop: tuple[str, ...]
    offload: tuple[str, ...] = ()
    to_forget: tuple[str, ...] = ()


class View(Protocol):
    """All that a policy may see of a request, as it is when the policy asks."""

    @property
    def request(self) -> Request: ...

    @property
    def emitted(self) -> int: ...

    @property
    def acceptance(self) -> Acceptance: ...

    @property
    def perceptible(self) -> bool: ...

    @property
    def length(self) -> Length:
        """What finished requests, a predictor or a probe taught of its output after the first `since` tokens."""

    @property
    def since(self) -> int:
        """0, or where in its output the last reading of a probe was that counts."""

    @property
    def remaining_tokens(self) -> float:
        """Of output, still to come by that belief."""

    @property
    def attained_s(self) -> float:
        """Nominal seconds of service so far (never wall time)."""

    @property
    def predicted_tokens(self) -> int:
        """Of output in all; never below what was emitted."""

    @property
    def prefill_s(self) -> float:
        """Nominal seconds of its whole prompt."""

    @property
    def prior_accepted(self) -> float:
        """Tokens a round, before it showed its own: as predicted, else as finished ones had."""

    @property
    def live_per_slot(self) -> float:
        """Requests that were live when it came, for each slot."""

    @property
    def memory_short(self) -> bool:
        """Whether the worker that it was offered to first had too little free memory to begin it early."""

    @property
    def usual_accepted(self) -> float:
        """Tokens a round of finished requests, whatever this one showed."""

    @property
    def hidden_s(self) -> float:
        """By how many nominal seconds its own rounds are shorter: its drafts are made elsewhere, meanwhile."""

    @property
    def resume_s(self) -> float:
        """Nominal seconds until it can draft: prefill still owed, and getting its KV back."""


class Unseen(NamedTuple):
    """What an earlier leader admitted and this one has yet to read. Its tenants and classes are not known."""

    requests: int = 0
    tokens: int = 0  # at most


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may be live at a time. `tokens`: of prompt and output, as many as they may come to. `backlog_s`: seconds
    that their work may take all workers together; None: as core/backlog.py says."""

    requests: float = inf
    tokens: float = inf
    backlog_s: float | None = inf


UNBOUNDED = Bounds()

# ---- errors ----


class QueueIsFull(Exception):
    """As much is live as may be. `room_s`: seconds until there is room, as believed. `of_tenant`: of this tenant's."""

    def __init__(self, message: str, room_s: float = 0.0, *, of_tenant: bool = False) -> None:
        super().__init__(message)
        self.room_s, self.of_tenant = room_s, of_tenant


class TooLarge(Exception):
    """It may need more tokens than may be live, even if nothing else were."""


class TooLate(Exception):
    """It cannot end before its deadline, even with nothing else to do."""


class AlreadySubmitted(Exception):
    """A request of that id is live."""
