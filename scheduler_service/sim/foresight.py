"""For how long requests that run are certain to go before those that wait. Runs nothing.

A claim is bounded over many rounds by `Policy.worst`. What is known is taken to be worse than now by CAUTION
(running.py), so that most bounds outlive what is learned meanwhile. Where no bound is tight enough claims are reckoned
round by round.
"""

from math import inf
from operator import itemgetter

from scheduler_service.core.fleet import Fleet
from scheduler_service.core.policies import Claim, Policy
from scheduler_service.core.ranking import Key
from scheduler_service.sim.accounts import Accounts
from scheduler_service.sim.running import Lessons, Order, Running, order_of, running_order

FORESEEN = (24, 6)  # rounds for which a claim is bounded at once, tried one after the other
RECKONED = 16  # rounds for which claims are reckoned one by one
MANY = 1 << 60


class Foresight:
    """`check_at`: the round after which somebody has to look again."""

    def __init__(self, fleet: Fleet, accounts: Accounts) -> None:
        self._policy, self._known = fleet.policy, fleet.known
        self._accounts, self._hindsight = accounts, accounts.hindsight
        self._bounds_claims = type(fleet.policy).worst is not Policy.worst
        self._monotone = fleet.policy.monotone or not fleet.policy.asks
        self._learned = self._epoch = 0  # grow when something is learned, and when it is more than was foreseen
        self.check_at = inf

    def learned(self, known: list[Lessons]) -> None:
        """All that was known before, between and after the ends of the last round."""
        if self._policy.asks and known[0] != known[-1]:
            self._learned += 1
            self._epoch += not self._monotone or self._hindsight.leaves_caution(known)
            if self._policy.perceptive:
                for run in self._accounts.runs.values():
                    self._hindsight.forget_foresight(run, self._accounts.round)

    def displaced(self, rivals: list[Key], *, all_of_them: bool) -> list[Running] | None:
        """Those that run and have a worse claim than the best that wait. The others are certain to have a better one
        until `check_at`. None: more may have to go than `rivals`, which are not all that wait, can tell."""
        worse = self._worse(rivals)
        worse.sort(key=itemgetter(0))
        out: list[Running] = []
        for key in rivals:
            if not worse or worse[-1][0] < order_of(key):
                return out
            out.append(worse.pop()[1])
        return out if all_of_them or not worse else None

    def all_go_on(self, rivals: list[Key]) -> bool:
        """Whether `displaced` finds nobody."""
        return not self._worse(rivals)

    def _worse(self, rivals: list[Key]) -> list[tuple[Order, Running]]:
        """Those that run and have a worse claim than the first of `rivals`."""
        self.check_at = inf
        if not rivals or rivals[0][0]:
            return []  # without preemption those that have begun go first
        most, round, hindsight, runs = (
            Claim(*rivals[0][3:6]),
            self._accounts.round,
            self._hindsight,
            self._accounts.runs,
        )
        unsure = [
            run
            for run in runs.values()
            if run.safe_until < round or run.bound > most or run.epoch != self._epoch or run.learned < self._learned
        ]
        if self._policy.perceptive:
            for run in unsure:
                hindsight.perceive(run, round)
        if self._bounds_claims and unsure:
            unsure = hindsight.cautiously(lambda: [run for run in unsure if not self._foresee(run, most)])
        worse = [(order, run) for run in unsure if (order := self._reckon(run, most)) is not None]
        self.check_at = round + 1
        if not worse:
            self.check_at = min([run.safe_until for run in runs.values()], default=inf) + 1
        return worse

    def _foresee(self, run: Running, most: Claim, back: int = 1) -> bool:
        """Whether its claim is certain to be no worse than `most` now and in some rounds to come. `back`: as it was
        before the last round, so that it does not matter what was known when its claim was reckoned after it."""
        entry, round, tokens = run.entry, self._accounts.round, run.course.tokens
        if back and (round - 1 <= run.joined or not (self._monotone or not self._hindsight.learned_in(round))):
            return False
        left = run.last_round - round - 1
        self._hindsight.show(run, round - back)
        for rounds in FORESEEN:
            ahead = min(rounds, left)
            brought = tokens[round + ahead - run.offset] - tokens[round - back - run.offset]
            worst = self._policy.worst(entry, self._known.round_s, ahead + back, brought)
            if worst is None:
                return False
            if worst <= most and not entry.overdue:
                run.epoch, run.learned, run.bound, run.safe_until = self._epoch, MANY, worst, round + ahead
                return True
        return False

    def _reckon(self, run: Running, most: Claim) -> Order | None:
        """Where it stands if its claim is worse than `most` now. Else for how many rounds it is certainly not."""
        hindsight, round, request = self._hindsight, self._accounts.round, run.entry.request
        claim = hindsight.claim_at(run, round)
        if claim > most:
            run.safe_until = -1
            return running_order(claim, request)
        left = run.last_round - round - 1
        fresh = self._bounds_claims and left and round - 1 <= run.joined
        if fresh and hindsight.cautiously(lambda: self._foresee(run, most, back=0)):
            run.bound = max(run.bound, claim)
            return None
        run.epoch, run.learned, run.bound, run.safe_until = self._epoch, self._learned, claim, round
        for later in range(round + 1, round + 1 + min(left, RECKONED)):
            hindsight.perceive(run, later)
            if (claim := hindsight.claim_at(run, later)) > most:
                break
            run.bound, run.safe_until = max(run.bound, claim), later
        return None
