"""What the core keeps of one live request and of one worker. Changed by the core alone."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler_service.core.beliefs import SOME_LENGTH, Acceptance, Length
from scheduler_service.core.classes import ClassTurn
from scheduler_service.core.fairness import FairRanking, Tenant
from scheduler_service.core.lifecycle import Move, State, after
from scheduler_service.core.policies import Claim
from scheduler_service.core.ranking import Key
from scheduler_service.core.types import Record, Request, RequestClass, WorkerUp

WORTH = 3.0  # times the seconds that its KV cost is a request served before it may lose it


@dataclass(slots=True, eq=False)
class Entry:
    request: Request
    state: State = State.WAITING
    home: str | None = None  # the worker it is placed on
    placement: int = 0  # grows with every move
    emitted: int = 0
    prefilled: int = 0  # tokens of its own prompt computed at least once
    prefill_owed: int = 0  # tokens to be computed before it can draft
    acceptance: Acceptance = field(default_factory=Acceptance)
    draft_len: int = 0  # that it was last planned to use
    length: Length = SOME_LENGTH
    left_tokens: float = 0.0  # of output, by that belief: `foresee`
    perceptible: bool = False
    overdue: bool = False  # overtaken as often as the policy allows
    preemptions: int = 0
    started: float | None = None
    blocks: int = 0  # of KV on its home worker
    offloaded: int = 0  # blocks that a copy of its KV takes in the memory of that worker's host; it has no others then
    kv_s: float = 0.0  # nominal seconds that its batch spent on computing its KV
    served_s: float = 0.0  # nominal seconds of service since that was computed, or came back
    deaths: int = 0  # of workers that ran it alone, one after the other
    probation: int = 0  # rounds with output until nobody suspects it any more (isolation.py)
    suspected: int = 0  # the placement under which it was last suspected
    crowd: int = 1  # that may have been under way then
    tenant: Tenant = field(default_factory=lambda: Tenant(""))  # whose it is
    turn: ClassTurn = field(default_factory=lambda: ClassTurn(RequestClass.DEFAULT))  # of its class
    claim: Claim = Claim(1, 0, 0.0)
    key: Key = ()  # where it stands in its ranking

    def __post_init__(self) -> None:
        self.prefill_owed = self.tokens

    @property
    def rounds(self) -> int:
        """Of decoding; prefill is counted in tokens."""
        return self.acceptance.rounds

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens + self.emitted

    def foresee(self) -> None:
        """What is left of it, now that its belief or its output has changed."""
        self.left_tokens = self.length.left(self.emitted, self.request.max_tokens)

    def worth(self, price_s: float) -> bool:
        """Whether it was served long enough, since its KV came, to have been worth `price_s` of its batch."""
        return not self.prefill_owed and self.served_s >= WORTH * price_s

    def move(self, move: Move) -> None:
        """Raises IllegalMove and changes nothing."""
        self.state = after(self.state, move)

    def lose_kv(self) -> None:
        if self.state is not State.WAITING:
            self.move(Move.EVICT)
        self.blocks = self.offloaded = 0
        self.kv_s = self.served_s = 0.0
        self.prefill_owed = self.tokens

    def offload_kv(self, blocks: int) -> None:
        """To `blocks` of its home's host memory, whence it comes back when it runs again."""
        if self.state is not State.WAITING:
            self.move(Move.EVICT)
        self.blocks, self.offloaded = 0, blocks
        self.served_s = 0.0

    def record(self) -> Record:
        return Record(
            request=self.request,
            state=self.state,
            placement=self.placement,
            emitted=self.emitted,
            prefilled=self.prefilled,
            acceptance=self.acceptance,
            perceptible=self.perceptible,
            level=self.claim.level,
            key=self.claim.key,
            preemptions=self.preemptions,
            started=self.started,
            deaths=self.deaths,
            probation=self.probation,
        )

    @classmethod
    def restored(cls, record: Record) -> "Entry":
        """As a new scheduler finds it: placed nowhere until a worker says that it still holds its KV."""
        return cls(
            request=record.request,
            placement=record.placement,
            emitted=record.emitted,
            prefilled=record.prefilled,
            acceptance=record.acceptance,
            perceptible=record.perceptible,
            preemptions=record.preemptions,
            started=record.started,
            deaths=record.deaths,
            probation=record.probation,
            suspected=record.placement,
        )


@dataclass(slots=True)
class Worker:
    up: WorkerUp
    free_blocks: int
    ranking: FairRanking = field(default_factory=FairRanking)  # of the requests whose home it is
    running: set[str] = field(default_factory=set)  # ran in its last round
    draining: bool = False  # it wants to end: nobody new comes
    full_at: float | None = None  # when its last round ended, if no slot was vacant
    planned: int = 0  # plans made for it
    listed: dict[str, int] = field(default_factory=dict)  # who may be under way there: the last plan that lists each
    apart: tuple[str, ...] = ()  # suspects that were given it to themselves
    left: dict[str, None] = field(default_factory=dict)  # requests that have gone from it since its last plan

    def plan(self, ids: Iterable[str]) -> None:
        """The next plan lists these."""
        self.planned += 1
        self.listed.update(dict.fromkeys(ids, self.planned))

    def obeyed(self, plan: int) -> None:
        """It has carried out this plan: no round of an earlier one is under way."""
        self.listed = {id: last for id, last in self.listed.items() if last >= plan}

    @property
    def vacancy(self) -> int:
        """Slots that its own requests leave free; negative when some of them wait."""
        return self.up.slots - len(self.ranking)

    def blocks_for(self, entry: Entry) -> int:
        """All of its KV, with 2 * (max_draft + 1) tokens in reserve: a plan is one step old when it is carried out."""
        tokens = entry.tokens + 2 * (self.up.max_draft + 1)
        return min(-(-tokens // self.up.block_tokens), self.up.blocks)
