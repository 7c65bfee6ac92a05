"""Requests that run in the lean loop (lean.py), and what a policy sees of each after any of its rounds. Runs nothing.

**Entries lag.** The entry of a request is set to a state when somebody looks at it, not after each round. So its claim,
too, is reckoned when somebody asks, and by what was known when the core would have reckoned it. An end teaches: of the
rows of one report those before it are reckoned by what was known before, and rows stand in the order of the plan.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from scheduler_service.core.entry import Entry
from scheduler_service.core.fleet import Fleet
from scheduler_service.core.policies import Claim
from scheduler_service.core.ranking import Key
from scheduler_service.core.types import Request
from scheduler_service.sim.course import Course

T = TypeVar("T")
Order = tuple[object, ...]  # of a key: what is compared among requests of one class and tenant
Lessons = tuple[int, ...]  # all that finished requests have taught and that claims depend on
NONE = Claim(0, 0, 0.0)
CAUTION = 0.03
OVERDUE = -1  # the tier of requests that were overtaken too often


class Running:
    """One request. Rounds are those of the loop, counted through; places are those of the request's course."""

    __slots__ = (
        "asked",
        "bound",
        "course",
        "entry",
        "epoch",
        "joined",
        "last_round",
        "learned",
        "longest_s",
        "offset",
        "order",
        "perceived",
        "safe_until",
        "served_until",
        "shared",
        "shown",
        "told",
    )

    def __init__(self, entry: Entry, course: Course, place: int, round: int, shared: int) -> None:
        self.entry, self.course = entry, course
        self.offset = round - place
        self.last_round = self.offset + course.end  # after which it has ended
        self.shown = self.told = place  # by its entry; and up to where the trace knows of its drafts
        self.shared = shared  # request-rounds of the loop that its account of overtaking knows of
        self.served_until = round  # of which its entry has the seconds of service
        self.longest_s = 0.0  # between two deliveries, since it runs here
        self.joins(round, order_of(entry.key))

    def joins(self, round: int, order: Order) -> None:
        """It stands there in the plan after that round, for certain."""
        self.joined, self.order = round, order
        self.asked = round - self.offset  # the place up to which it was asked whether it is perceptible
        self.perceived = self.asked if self.entry.perceptible else None  # the place from which on it is
        # Up to which round its claim is no worse than `bound`, within an epoch and while no more is learned than that.
        self.epoch = self.learned = self.safe_until = -1
        self.bound = NONE


def order_of(key: Key) -> Order:
    return (key[0], *key[3:])


def running_order(claim: Claim, request: Request) -> Order:
    """Of one that runs and has this claim, as `Fleet.key` puts it."""
    return (False, *claim, False, request.arrival, request.id)


class Lesson(NamedTuple):
    """A round with ends: where these stood in the plan before it, and what was known before and after each."""

    round: int
    orders: list[Order]
    known: list[Lessons]


class Hindsight:
    """Shows entries as they are, were, or will be. `lessons`: the last rounds with ends, which follow one another
    without a round between them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._policy, self._known = fleet, fleet.policy, fleet.known
        self.lessons: list[Lesson] = []
        self._cautious: tuple[float, ...] | None = None  # no better is known, whatever is learned in an epoch

    def begin(self) -> None:
        """Forget lessons and caution of an earlier run of the loop: since then other requests may have taught more."""
        self.lessons.clear()
        self._cautious = None

    # ---- what was known ----

    def known_now(self) -> Lessons:
        seen, length = self._known.acceptance, self._known.length
        return seen.rounds, seen.drafted, seen.accepted, seen.rejected, length.finished, length.tokens

    def _set_known(self, lessons: tuple[Any, ...]) -> None:
        seen, length = self._known.acceptance, self._known.length
        seen.rounds, seen.drafted, seen.accepted, seen.rejected, length.finished, length.tokens = lessons

    def _by(self, lessons: tuple[float, ...], what: Callable[[Running], T], run: Running) -> T:
        """As if no more than these had been learned."""
        now = self.known_now()
        self._set_known(lessons)
        try:
            return what(run)
        finally:
            self._set_known(now)

    def cautiously(self, what: Callable[[], T]) -> T:
        """As if requests had ended that were longer and of which less was accepted, by CAUTION."""
        if not self._policy.monotone:
            return what()
        now = self.known_now()
        if self._cautious is None:
            self._cautious = _worse([now, *(known for lesson in self.lessons for known in lesson.known)])
        self._set_known(self._cautious)
        try:
            return what()
        finally:
            self._set_known(now)

    def leaves_caution(self, known: list[Lessons]) -> bool:
        """Whether something of this is worse than `cautiously` takes for granted."""
        if self._cautious is None or all(_within(each, self._cautious) for each in known):
            return False
        self._cautious = None
        return True

    def _known_at(self, run: Running, round: int) -> Lessons | None:
        """The lessons known when the core would have folded this request's row of that round. None: all of today's."""
        if not self.lessons or round > self.lessons[-1].round:
            return None
        if round < self.lessons[0].round:
            return self.lessons[0].known[0]
        lesson = self.lessons[round - self.lessons[0].round]
        if lesson.known[0] == lesson.known[-1]:
            return lesson.known[0]
        own = self.order_at(run, round - 1)
        return lesson.known[sum(order < own for order in lesson.orders)]

    def learned_in(self, round: int) -> bool:
        return bool(self.lessons) and self.lessons[-1].round == round

    # ---- what is seen of a request ----

    def show(self, run: Running, round: int) -> Entry:
        """Its entry, as it is after that round."""
        entry, place = run.entry, round - run.offset
        if place != run.shown:
            run.shown = place
            entry.emitted = emitted = run.course.tokens[place]
            entry.remaining_tokens = entry.forecast.remaining(emitted - entry.since)
            entry.acceptance = run.course.acceptance(place)
        entry.perceptible = run.perceived is not None and place >= run.perceived
        return entry

    def perceive(self, run: Running, round: int) -> None:
        """Ask whether it is perceptible, after each round up to that one. Nothing may have been learned since the first
        of them but in the very last one."""
        if not self._policy.perceptive:
            return
        last = min(round - run.offset, run.course.end - 1)  # nobody is asked after its last round
        while run.perceived is None and run.asked < last:
            run.asked += 1
            at = run.asked + run.offset
            known = self._known_at(run, at)
            self.show(run, at)
            asks = self._perceives
            if asks(run) if known is None else self._by(known, asks, run):
                run.perceived = run.asked

    def forget_foresight(self, run: Running, round: int) -> None:
        """Something was learned in that round: what was found out of its state then, and later, holds no longer."""
        before = round - 1 - run.offset
        if run.asked > before:
            run.asked = before
            if run.perceived is not None and run.perceived > before:
                run.perceived = None

    def claim_at(self, run: Running, round: int) -> Claim:
        """The claim that the core has reckoned, or would have, after that round; later ones by what is known now."""
        if round == run.joined:
            return Claim(*run.order[1:4])  # type: ignore[arg-type]
        entry = self.show(run, round)
        if entry.overdue:
            return Claim(1, OVERDUE, entry.request.arrival)
        if not self.lessons or round > self.lessons[-1].round:
            return self._policy.claim(entry, self._known.round_s)
        known = self._known_at(run, round)
        self.show(run, round)
        return self._claim(run) if known is None else self._by(known, self._claim, run)

    def _perceives(self, run: Running) -> bool:
        return self._policy.perceives(run.entry)

    def _claim(self, run: Running) -> Claim:
        return self._policy.claim(run.entry, self._known.round_s)

    def order_at(self, run: Running, round: int) -> Order:
        """Where it stood in the plan after that round."""
        if round == run.joined:
            return run.order
        return running_order(self.claim_at(run, round), run.entry.request)

    def rank(self, run: Running, round: int) -> None:
        """Put it where the core would have put it after that round, the last one."""
        if round == run.joined:
            self.show(run, round)
            return
        known = self._known_at(run, round)
        self.show(run, round)
        if known is None:
            self._fleet.rank(run.entry)
        else:
            self._by(known, lambda one: self._fleet.rank(one.entry), run)
        run.joins(round, order_of(run.entry.key))

    def believed_rounds(self, run: Running, round: int) -> int:
        """The rounds that the request was believed to need after that round."""
        entry = run.entry
        if round == run.joined:
            return entry.rounds_counted
        tokens = entry.forecast.remaining(run.course.tokens[round - run.offset] - entry.since)
        if not self.lessons or (known := self._known_at(run, round)) is None:
            return self._fleet.rounds_for(tokens)
        return math.ceil(tokens / (known[2] / known[0] + 1))  # as Fleet.rounds_for


def _worse(known: list[Lessons]) -> tuple[float, ...]:
    """Worse than all of them by CAUTION."""
    drafted = min([each[1] / each[0] for each in known]) * (1 - CAUTION)
    accepted = min([each[2] / each[0] for each in known]) * (1 - CAUTION)
    if not all(each[4] for each in known):
        return 1.0, drafted, accepted, 0.0, 0, 0  # nothing is known of lengths: the bound on output is believed
    return 1.0, drafted, accepted, 0.0, 1, max([each[5] / each[4] for each in known]) * (1 + CAUTION)


def _within(known: Lessons, worse: tuple[float, ...]) -> bool:
    rounds, drafted, accepted, _, finished, tokens = known
    shorter = not worse[4] or (finished > 0 and tokens <= worse[5] * finished)
    return drafted >= worse[1] * rounds and accepted >= worse[2] * rounds and shorter
