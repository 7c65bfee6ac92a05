"""A post and a target on a clock of the test's own, for tests of the drafter that is elsewhere. No test lives here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import torch

from worker_service.engine.drafting.drafter import Ask, Verified
from worker_service.engine.drafting.prefix import EMPTY, extended
from worker_service.engine.drafting.remote import Chain
from worker_service.engine.drafting.remote_drafter import Drafts, News, RemoteDrafter, Truth, Welcome

PASS_S = 0.010
HIDDEN = torch.zeros(1)
USUAL = Welcome(64, 16, 10_000, 100)


@dataclass
class Office:
    """A post whose drafter answers each truth `delay_s` later with what `guesses` says, and whose clock moves only
    while it is waited for and when the test says so."""

    delay_s: float = inf
    guesses: Sequence[int] = (1, 1, 1, 1)
    full: bool = False
    behind: int = 0  # tokens of the text that it does not know yet when it answers
    lies: int = 0  # added to digests
    time_s: float = 0.0
    sent: list[list[Truth]] = field(default_factory=list)
    texts: dict[int, list[int]] = field(default_factory=dict)
    coming: list[tuple[float, News]] = field(default_factory=list)

    def now(self) -> float:
        return self.time_s

    def send(self, rows: Sequence[Truth]) -> bool:
        if self.full:
            return False
        self.sent.append(list(rows))
        for row in rows:
            text = self.texts.setdefault(row.handle, [])
            text[row.start :] = row.tokens
            if row.ahead and self.delay_s < inf:
                due_s = self.time_s + self.delay_s
                at = len(text) - self.behind
                chain = Chain(at, extended(EMPTY, text[:at]) + self.lies, self.guesses)
                self.coming.append((due_s, Drafts(due_s, [(row.handle, chain)])))
        return True

    def receive(self, wait_s: float) -> Sequence[News]:
        first_s = min((due_s for due_s, _ in self.coming), default=inf)
        self.time_s = max(self.time_s, min(first_s, self.time_s + wait_s))
        here = [news for due_s, news in self.coming if due_s <= self.time_s]
        self.coming = [(due_s, news) for due_s, news in self.coming if due_s > self.time_s]
        return here

    def rows(self) -> list[Truth]:
        return [row for rows in self.sent for row in rows]


class Table:
    """A target that emits `token` and the guesses that equal it, a pass in PASS_S, for the requests that are there."""

    def __init__(self, office: Office, welcome: Welcome = USUAL, token: int = 1) -> None:
        self.office, self.token = office, token
        self.drafter = RemoteDrafter(office, b"key")
        self.texts: dict[str, list[int]] = {}
        self.waits_s: list[float] = []
        office.coming.append((0.0, welcome))

    def admit(self, name: str, tokens: Sequence[int] = (5, 6), **about: str | bool) -> None:
        self.texts[name] = list(tokens)
        self.drafter.expect(Ask(name, self.texts[name], 0, **about))  # type: ignore[arg-type]

    def step(self, draft_len: int = 4) -> list[list[int]]:
        drafts = self.drafter.propose([Ask(name, text, draft_len) for name, text in self.texts.items()])
        self.waits_s.append(self.drafter.waited_s)
        self.office.time_s += PASS_S
        rounds = []
        for (name, text), own in zip(self.texts.items(), drafts, strict=True):
            wrong = next((i for i, draft in enumerate(own) if draft != self.token), len(own))
            text += [*own[:wrong], self.token]
            rounds.append(Verified(name, text, HIDDEN))
        self.drafter.verified(rounds)
        return drafts
