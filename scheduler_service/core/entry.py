"""What the core keeps of one live request and of one worker. Changed by the core alone; decides nothing."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from scheduler_service.core.beliefs import Acceptance, Forecast, Length
from scheduler_service.core.classes import ClassAccount
from scheduler_service.core.events import WorkerUp
from scheduler_service.core.fair_ranking import FairRanking
from scheduler_service.core.fairness import Flow, Tenant
from scheduler_service.core.known import Known
from scheduler_service.core.lifecycle import Move, State, after
from scheduler_service.core.policies import Claim
from scheduler_service.core.probed import Kept
from scheduler_service.core.ranking import Key
from scheduler_service.core.types import Record, Request

WORTH = 3.0  # a request may lose its KV once it was served for this many times the seconds that its KV cost


@dataclass(slots=True, eq=False)
class Entry:
    """One live request. To a policy it is a `types.View`, which shows a part of it."""

    request: Request
    known: Known
    state: State = State.WAITING
    home: str | None = None  # the worker it is placed on
    placement: int = 0  # grows with every move
    emitted: int = 0  # output tokens
    prefilled: int = 0  # tokens of its own prompt computed at least once
    prefill_owed: int = 0  # tokens to be computed before it can draft
    acceptance: Acceptance = field(default_factory=Acceptance)
    draft_len: int = 0  # that it was last planned to use
    elsewhere: bool = False  # its drafts are made elsewhere, by the last plan that listed it
    hidden_s: float = 0.0  # by how many nominal seconds its own rounds are shorter for that
    length: Length = field(init=False)  # what is believed of its output after the first `since` tokens: `expect`
    since: int = 0
    readings: list[Kept] = field(default_factory=list)  # of a worker's probe
    forecast: Forecast = field(init=False)  # of what remains of it, by that belief
    remaining_tokens: float = 0.0  # of output still to come, by that forecast
    rounds_counted: int = 0  # request-rounds that remain of it, as `Load` counts them: believed when it was last ranked
    prefill_counted: int = 0  # the same of `prefill_owed`
    perceptible: bool = False
    overdue: bool = False  # overtaken as often as the policy allows
    live_per_slot: float = 0.0  # requests that were live when it came, for each slot
    memory_short: bool = False  # when it came
    last_token_s: float = -inf  # when it last got tokens, as far as this scheduler knows
    due: bool = False  # it has begun, and paused for as long as the policy allows
    preemptions: int = 0
    started: float | None = None  # when its first round began
    given_slot: bool = False  # by a plan that stood: it may have begun (`Fleet.give_slots`)
    blocks: int = 0  # of KV on its home worker
    offloaded: int = 0  # blocks that its KV takes in the memory of that worker's host; then it has no others
    kv_s: float = 0.0  # nominal seconds that its batch spent on computing its KV
    served_s: float = 0.0  # nominal seconds of service since that was computed, or came back
    deaths: int = 0  # of workers that ran it alone, one after the other
    probation: int = 0  # rounds with output until it is no suspect any more (isolation.py)
    suspected: int = 0  # the placement under which it was last suspected
    accuser: str = ""  # the worker that seemed to die then, and has not come back alive since
    crowd: int = 1  # requests that may have been under way on its worker then
    tenant: Tenant = field(init=False)  # whose it is, and what it is charged to: `Fleet.prepare`
    flow: Flow = field(init=False)
    of_class: ClassAccount = field(init=False)
    changed: bool = True  # since its last record was written, in more than output, acceptance and key
    claim: Claim = Claim(1, 0, 0.0)
    key: Key = ()  # where it stands in its ranking; (): in none

    def __post_init__(self) -> None:
        self.prefill_owed = self.tokens

    @property
    def rounds(self) -> int:
        """Of decoding; prefill is counted in tokens."""
        return self.acceptance.rounds

    @property
    def tokens(self) -> int:
        """Of prompt and output so far."""
        return self.request.prompt_tokens + self.emitted

    # ---- what a policy may ask, beside some of the fields ----

    @property
    def attained_s(self) -> float:
        return self.acceptance.rounds * self.known.round_s + self.prefilled * self.known.cost.prefill_token_s

    @property
    def predicted_tokens(self) -> int:
        request = self.request
        predicted = self.known.length.predict(request.predicted_tokens, request.max_tokens, request.expected)
        return max(predicted, self.emitted)

    @property
    def prefill_s(self) -> float:
        return self.request.prompt_tokens * self.known.cost.prefill_token_s

    @property
    def prior_accepted(self) -> float:
        expected, fleet = self.request.expected, self.known.acceptance
        if expected is None or expected.acceptance is None:
            return fleet.per_round
        return expected.acceptance * fleet.drafts_per_round

    @property
    def usual_accepted(self) -> float:
        return self.known.acceptance.per_round

    @property
    def resume_s(self) -> float:
        cost = self.known.cost
        back_s = cost.resume_s if self.state is State.PAUSED else 0.0
        return self.prefill_owed * cost.prefill_token_s + self.offloaded * cost.offload_block_s + back_s

    # ---- changes ----

    def expect(self, length: Length, since: int = 0) -> None:
        """Believe in an output of this length, after the first `since` tokens, from now on."""
        self.length, self.since = length, since
        self.forecast = Forecast(length, max(0, self.request.max_tokens - since))
        self.remaining_tokens = self.forecast.remaining(self.emitted - since)

    def worth(self, price_s: float) -> bool:
        """Whether it was served long enough, since its KV came, to have been worth `price_s` of its batch."""
        return not self.prefill_owed and self.served_s >= WORTH * price_s

    def move(self, move: Move) -> None:
        """Raises IllegalMove and changes nothing."""
        before, self.state = self.state, after(self.state, move)
        self.changed = True
        self.count(before, -1)
        self.count(self.state, 1)

    def count(self, state: State, number: int) -> None:
        """So many more of its class and tenant are in this state."""
        self.of_class.in_state[state] += number
        if state is State.WAITING:
            self.tenant.waiting += number

    def next_placement(self) -> None:
        """What its worker still reports of it from before is stale."""
        self.placement += 1
        self.changed = True

    def lose_kv(self) -> None:
        """All of it, on the worker and in its host's memory."""
        if self.state is not State.WAITING:
            self.move(Move.EVICT)
        self.blocks = self.offloaded = 0
        self.kv_s = self.served_s = 0.0
        self.prefill_owed = self.tokens

    def offload_kv(self, blocks: int) -> None:
        """Its KV goes to `blocks` of its host's memory, and comes back when it runs there again."""
        if self.state is not State.WAITING:
            self.move(Move.EVICT)
        self.blocks, self.offloaded = 0, blocks
        self.served_s = 0.0

    def record_to_write(self) -> Record:
        """Its record, which is written now."""
        self.changed = False
        return self.record()

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
    def restored(cls, record: Record, known: Known) -> "Entry":
        """As a new scheduler finds it: placed nowhere until a worker says that it still holds its KV."""
        return cls(
            request=record.request,
            known=known,
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
    """One attached worker, as the last report and the plans since then leave it."""

    up: WorkerUp
    free_blocks: int
    ranking: FairRanking  # of the requests whose home it is
    running: set[str] = field(default_factory=set)  # ran in its last round
    draining: bool = False  # it wants to end: no request is placed on it any more
    full_at: float | None = None  # when its last round ended, if no slot was vacant
    planned: int = 0  # plans made for it
    reports: int = 0  # of rounds, that it has sent
    obeyed_plan: int = -1  # the last one that it is known to have carried out
    listed: dict[str, int] = field(default_factory=dict)  # may be under way there: the last plan that lists each
    quarantined: tuple[str, ...] = ()  # suspects that were given it to themselves
    to_forget: dict[str, None] = field(default_factory=dict)  # requests that have gone from it since its last plan
    memory_tokens: int = field(init=False)  # of KV, that fit into its memory
    round_tokens: int = field(init=False)  # that a request may get in one round
    drafted_elsewhere: tuple[Entry, ...] = ()  # by its last plan
    left_out: tuple[str, ...] = ()  # requests that its last plan had no memory for; they may have gone since
    order: tuple[str, ...] = ()  # of the requests in its last plan
    spare: tuple[object, Key | None] = ((), None)  # where a search for one that another worker may claim begins

    def __post_init__(self) -> None:
        self.memory_tokens = self.up.blocks * self.up.block_tokens
        self.round_tokens = self.up.max_draft + 1

    def plan(self, ids: Iterable[str]) -> None:
        """The next plan lists these."""
        self.planned += 1
        self.order = tuple(ids)
        self.listed |= dict.fromkeys(self.order, self.planned)

    def obeyed(self, plan: int) -> None:
        """It has carried out this plan: no round of an earlier one is under way."""
        if plan != self.obeyed_plan:
            self.obeyed_plan = plan
            self.listed = {id: last for id, last in self.listed.items() if last >= plan}

    def holds(self, entry: Entry) -> bool:
        """Whether the request can run a round here: its tokens after that fit into the memory."""
        return min(entry.request.most_tokens, entry.tokens + self.round_tokens) <= self.memory_tokens

    @property
    def vacancy(self) -> int:
        """Slots that its own requests leave free; negative when some of them wait."""
        return self.up.slots - len(self.ranking)

    def blocks_for(self, entry: Entry, rounds: int = 2) -> int:
        """All of its KV after so many more rounds. Two: a plan is one step old when it is carried out."""
        up = self.up
        tokens = entry.request.prompt_tokens + entry.emitted + rounds * self.round_tokens
        blocks = -(-tokens // up.block_tokens)
        return blocks if blocks < up.blocks else up.blocks
