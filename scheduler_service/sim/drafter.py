"""A drafter elsewhere, without a model: which of its guesses are right is known, and when each of them is there.

It works step by step, each step one more position on every chain of every request, and never waits: it goes on from its
own guesses while the target verifies, and starts anew where it hears that they were wrong. It decides nothing.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from random import Random

from scheduler_service.sim.workload import Job

FURTHEST = 64  # positions that it drafts beyond what it knows
_NEVER = 10**9


@dataclass(frozen=True, slots=True)
class Apart:
    """Where drafts are made while the target verifies. Milliseconds.

    `fan`: 0, it guesses nothing beyond a chain for what is known; 1, that chain goes on through the next pass; more, so
    many guesses at each position where it may end. `second`: the chance that a second guess is right where the first
    was wrong; a further one has half the chance of the one before.
    """

    rtt_ms: float = 1.0
    supply_ms: float = 1.5  # per position of one chain
    chain_ms: float = 0.01  # that each further chain adds to it
    chains: int = 64  # requests that it drafts for at a time; 0: the worker drafts itself, and is right as often
    fan: int = 1
    second: float = 0.3
    lookup: float = 0.0  # the chance of a token looked up instead, where drafts are late
    wait: bool = True  # rounds wait for late drafts, half a pass at most, while that pays
    ready_first: bool = False

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be from {low} to {high}")


def parse_apart(text: str) -> Apart:
    """`name=value,name=value` as an Apart. Raises ValueError."""
    kinds: dict[str, type] = {one.name: type(one.default) for one in fields(Apart)}
    values: dict[str, float | bool] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in kinds:
            raise ValueError(f"{name!r} is not a setting; known: {', '.join(kinds)}")
        try:
            values[name] = {"true": True, "false": False}[value] if kinds[name] is bool else kinds[name](value)
        except (KeyError, ValueError):
            raise ValueError(f"{name}: {value!r} is no {kinds[name].__name__}") from None
    return Apart(**values)  # type: ignore[arg-type]


_RANGES = (
    ("rtt_ms", 0, 10_000),
    ("supply_ms", 0.001, 10_000),
    ("chain_ms", 0, 10_000),
    ("chains", 0, 4096),
    ("fan", 0, 8),
    ("second", 0, 1),
    ("lookup", 0, 0.99),
)


def fan_of(step: float, chain: float, requests: int, need: int) -> int:
    """How many guesses at each position where a pass may end a drafter has time for, while it drafts `need` tokens for
    each of so many requests. `step`: what a token of one chain takes, `chain`: what each further chain adds to that.

    Two where all chains together make a step at most five times as long, for the second guess is often the right one;
    three or four where it stays below one and a half; else 0: the main chain alone. A further chain counts as a 256th
    of a step at least, since one that was measured to take nothing still takes memory and time to look at. A worker
    has the same function: worker_service/engine/drafting/worth.py.
    """
    for fan in (4, 3, 2):
        further = requests * (1 + (need + 1) * (fan - 1)) - 1
        if max(chain, step / 256) * further <= (4.0 if fan == 2 else 0.5) * step:
            return fan
    return 0


class Truth:
    """Of one job: at which positions of its output the drafter's first guess is wrong, and which guess is right."""

    def __init__(self, job: Job, second: float) -> None:
        rng = Random(f"guesses {job.id}")
        hits: list[bool] = []
        rejected = sum(1 for accepted in job.accepted if accepted < job.draft_len)
        chance = sum(job.accepted) / max(1, sum(job.accepted) + rejected)
        script = job.accepted or (0,)
        while len(hits) < job.output_tokens + 2 * FURTHEST:
            for accepted in script:
                hits += [True] * accepted
                hits.append(rng.random() < chance if accepted >= job.draft_len else False)
        self.wrong = [_NEVER] * (len(hits) + 1)  # the first position after this one where it is; positions from 1
        self._rank = [_rank(rng, second) for _ in hits]
        after = _NEVER
        for position in range(len(hits), -1, -1):
            self.wrong[position] = after
            if position and not hits[position - 1]:
                after = position

    def guessed(self, position: int, fan: int) -> bool:
        """Whether one of `fan` guesses at a position where the first is wrong is right."""
        return self._rank[position - 1] <= fan

    def accepts(self, emitted: int, drafts: int) -> int:
        """Of so many drafts made from the truth."""
        return min(drafts, self.wrong[emitted] - 1 - emitted)


def _rank(rng: Random, chance: float) -> int:
    rank = 2
    while rng.random() >= chance:
        rank, chance = rank + 1, chance / 2
        if rank > 8:
            break
    return rank


@dataclass(slots=True)
class _Text:
    """What the drafter has of one request. `known`: tokens it was told of. Its main chain begins after `origin` tokens
    with one time for each guess, when it was made; `branches` begin at a position with another guess."""

    truth: Truth
    begins: float  # when it has read the text
    known: int
    origin: int
    main: list[float]
    branches: dict[int, list[float]]
    length: int  # drafts in a round
    told: float  # when the worker last told it something
    heard: int  # tokens of output by then


class SimDrafter:
    """Serves one worker. `pass_s`: of the target, roughly; `read_s`: for each token of a text that is new to it."""

    def __init__(self, apart: Apart, pass_s: float, read_s: float) -> None:
        self.apart, self._pass_s, self._read_s = apart, pass_s, read_s
        self._texts: dict[str, _Text] = {}
        self._half_s = apart.rtt_ms / 2e3
        self._news: deque[tuple[float, str, int]] = deque()
        self._now = 0.0  # its last step ended then

    def tell(self, id: str, truth: Truth, emitted: int, tokens: int, length: int, at: float) -> None:
        """The worker says that this request has emitted so many tokens, and how many drafts it wants. `tokens`: of its
        text."""
        text = self._texts.get(id)
        if text is None:
            begins = at + self._half_s + tokens * self._read_s
            self._texts[id] = _Text(truth, begins, emitted, emitted, [], {}, length, at, emitted)
            return
        text.length, text.told, text.heard = length, at, emitted
        self._news.append((at + self._half_s, id, emitted))

    def knows(self, id: str) -> bool:
        return id in self._texts

    def forget(self, id: str) -> None:
        self._texts.pop(id, None)

    def offer(self, id: str, emitted: int, at: float) -> tuple[int, int]:
        """How many drafts of it are with the worker at that time, and how many of those are right."""
        self._draft_until(at - self._half_s)
        text = self._texts[id]
        origin, times, wrong = text.origin, text.main, text.truth.wrong[text.origin]
        if emitted >= wrong:
            branch = text.branches.get(wrong)
            if branch is None or not text.truth.guessed(wrong, self.apart.fan):
                return 0, 0
            origin, times, wrong = wrong, branch, text.truth.wrong[wrong]
            if emitted >= wrong:
                return 0, 0
        if emitted < origin:
            return 0, 0
        there = origin + bisect_right(times, at - self._half_s) - emitted
        drafts = max(0, min(there, text.length))
        return drafts, min(drafts, wrong - 1 - emitted)

    def due_s(self, id: str, at: float, most: int = FURTHEST) -> float:
        """Seconds until its drafts, `most` of them at most, are with the worker, as that reckons: since it told of the
        text."""
        text = self._texts[id]
        needed_s = 2 * self._half_s + min(text.length, most) * self._step_s(len(self._texts))
        return max(text.told, text.begins - self._half_s) + needed_s - at

    def _step_s(self, chains: int) -> float:
        return 1e-3 * (self.apart.supply_ms + self.apart.chain_ms * (chains - 1))

    def _ahead(self, text: _Text) -> int:
        """Guesses beyond what it knows."""
        if not (self.apart.fan and text.length):
            return text.length
        passes = math.ceil((2 * self._half_s + self._pass_s) / self._pass_s)
        return min(text.length + passes * (text.length + 1), FURTHEST)

    def _learn(self, text: _Text, emitted: int) -> None:
        text.known = emitted
        wrong = text.truth.wrong[text.origin]
        if emitted >= wrong:
            branch = text.branches.get(wrong)
            if branch is not None and text.truth.guessed(wrong, self.apart.fan) and emitted < text.truth.wrong[wrong]:
                text.origin, text.main = wrong, branch
                # It has looked at second guesses along the branch, too.
                ends = range(emitted + 1, min(wrong + len(branch), emitted + text.length + 1) + 1)
                text.branches = {position: [] for position in ends}
            else:
                text.origin, text.main, text.branches = emitted, [], {}
        if text.origin + len(text.main) < emitted:  # the worker is ahead of it
            text.origin, text.main, text.branches = emitted, [], {}
        text.branches = {at: times for at, times in text.branches.items() if at > emitted}

    def _draft_until(self, limit: float) -> None:
        """The steps that end by then."""
        fan = self.apart.fan
        while True:
            while self._news and self._news[0][0] <= self._now:
                _, id, emitted = self._news.popleft()
                if (text := self._texts.get(id)) is not None:
                    self._learn(text, emitted)
            reading = [text.begins for text in self._texts.values() if text.begins > self._now]
            texts = [text for text in self._texts.values() if text.begins <= self._now]
            main = [text for text in texts if text.origin + len(text.main) - text.known < self._ahead(text)]
            branches = _short_branches(texts) if fan > 1 else []
            if not main and not branches:
                soonest = min([*reading, *(at for at, *_ in list(self._news)[:1])], default=math.inf)
                if soonest > limit:
                    return
                self._now = soonest
                continue
            end = self._now + self._step_s(len(main) + len(branches) * (fan - 1))
            if end > limit:
                return
            for text in main:
                text.main.append(end)
                position = text.origin + len(text.main)
                if fan > 1 and position <= text.known + text.length + 1:
                    text.branches[position] = []
            for times in branches:
                times.append(end)
            self._now = end


def _short_branches(texts: Sequence[_Text]) -> list[list[float]]:
    return [times for text in texts for times in text.branches.values() if len(times) < text.length]
