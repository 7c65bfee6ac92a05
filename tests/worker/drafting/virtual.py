"""A worker's end of drafting apart and the drafter's, real but for the model and the link, on one clock of the test's
own: what a step waits is exact, on any machine. No test lives here."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random

import torch

from tests.worker.drafting.knowing import BLOCK_TOKENS, FAN, Knowing, Known
from worker_service.drafting.passes import Passes
from worker_service.drafting.texts import Guess, Name, Wish
from worker_service.engine.drafting.drafter import Ask, Verified
from worker_service.engine.drafting.post import Drafts, Gone, News, Truth, Welcome
from worker_service.engine.drafting.remote import Chain
from worker_service.engine.drafting.remote_drafter import RemoteDrafter
from worker_service.engine.ready_first import ReadyFirst
from worker_service.engine.target import InputSequence, Passed

HIDDEN = torch.zeros(1)
DRAFT_LEN = 4
VOCABULARY = 256


class Counting(Knowing):
    """It takes no time, and says how many chains there were in the last pass."""

    chains = 0

    def forward(self, sequences: Sequence[InputSequence]) -> Passed:
        self.chains = len(sequences)
        return super().forward(sequences)


class Way:
    """A post, the way behind it, and the drafter at its end. The clock moves while it is waited for, and when the test
    says so."""

    def __init__(self, known: Known) -> None:
        self.time_s = 0.0
        self._step_s, self._chain_s, self._half_s = known.supply_ms / 1e3, known.chain_ms / 1e3, known.rtt_ms / 2e3
        self._model = Counting(replace(known, supply_ms=0.0, chain_ms=0.0))
        sizes = {"context_tokens": 4096, "blocks": 512, "block_tokens": BLOCK_TOKENS, "lines": 512, "fan": FAN}
        self._passes = Passes(self._model, **sizes)  # type: ignore[arg-type]
        self._welcome = Welcome(64, 32, 4096, known.vocab_size, self._step_s, self._chain_s, FAN)
        self._computed_s = 0.0  # what the drafter does is known until then
        self._up: list[tuple[float, Sequence[Truth]]] = []
        self._down: list[tuple[float, News]] = [(0.0, self._welcome)]

    def now(self) -> float:
        return self.time_s

    def send(self, rows: Sequence[Truth]) -> bool:
        self._up.append((self.time_s + self._half_s, list(rows)))
        return True

    def receive(self, wait_s: float) -> Sequence[News]:
        until_s = self.time_s + wait_s
        self._compute(until_s)
        first_s = min((due_s for due_s, _ in self._down), default=inf)
        self.time_s = max(self.time_s, min(first_s, until_s))
        here = [news for due_s, news in self._down if due_s <= self.time_s]
        self._down = [each for each in self._down if each[0] > self.time_s]
        return here

    def restart(self) -> None:
        """The drafter dies, with all that is on its way, and another one is there."""
        self._passes.texts.forget_all(1)
        self._up = []
        self._down = [(self.time_s, Gone()), (self.time_s + self._half_s, self._welcome)]

    def settle(self) -> None:
        """All that is on its way arrives, and the drafter computes what is wanted."""
        self.time_s += 1e6
        self._compute(self.time_s)

    @property
    def empty(self) -> bool:
        """Whether the drafter has neither a text nor KV."""
        pool = self._passes.texts.pool
        return not self._passes.texts.by_name and pool.free_blocks == pool.blocks

    def _compute(self, until_s: float) -> None:
        """Passes that begin by then."""
        while self._computed_s <= until_s:
            told, made = self._learn(), self._passes.run()
            if made is not None:
                self._computed_s += self._step_s + self._chain_s * (self._model.chains - 1)
            self._tell([*told, *(made or [])])
            if made is None:  # until it hears something
                heard_s = min((due_s for due_s, _ in self._up), default=inf)
                if heard_s > until_s:
                    return
                self._computed_s = max(self._computed_s, heard_s)

    def _learn(self) -> list[tuple[Name, Guess]]:
        here = [rows for due_s, rows in self._up if due_s <= self._computed_s]
        del self._up[: len(here)]
        told = []
        for row in (row for rows in here for row in rows):
            name, wish = Name(1, row.handle), Wish(row.need, row.ahead, row.fan, row.depth)
            if row.forget:
                self._passes.texts.forget(name)
            elif guess := self._passes.texts.learn(name, row.start, array("i", row.tokens), wish, row.salt.hex()):
                told.append((name, guess))
        return told

    def _tell(self, told: Sequence[tuple[Name, Guess]]) -> None:
        if told:
            there_s = self._computed_s + self._half_s
            chains = [(name.handle, Chain(guess.at, guess.prefix, guess.tokens)) for name, guess in told]
            self._down.append((there_s, Drafts(there_s, chains)))


@dataclass
class Answered:
    passes: int = 0
    rounds: int = 0
    waited_s: float = 0.0  # before passes, in all
    hits: int = 0  # rounds with drafts
    took_s: float = 0.0

    def hidden(self, known: Known) -> float:
        """The share of the way there and back, and of drafting, that held up no pass."""
        return 1 - self.waited_s / self.passes / (1e-3 * (known.rtt_ms + DRAFT_LEN * known.supply_ms))


def answer(known: Known, pass_s: float, *, tokens: int = 160, requests: int = 1, slots: int = 1) -> Answered:
    """All requests answered in passes of `pass_s`, so many at a time; with more than slots those go first that are
    ready. Every text is the one that it would be without drafts."""
    known = replace(known, vocab_size=VOCABULARY)
    random = Random(requests)
    pairs = [([number], random.choices(range(VOCABULARY), k=tokens)) for number in range(requests)]
    way, rule, found = Way(replace(known, pairs=pairs)), ReadyFirst(), Answered()
    drafter = RemoteDrafter(way, b"key")
    wholes = {str(number): [*prompt, *output] for number, (prompt, output) in enumerate(pairs)}
    asks = {name: Ask(name, whole[:1], DRAFT_LEN) for name, whole in wholes.items()}
    for ask in asks.values():
        drafter.expect(ask)
    begun_s = way.time_s = pass_s  # after that of the prompts
    while asks:
        order = list(asks)
        if requests > slots:
            order = rule.order(order, slots, set(order), drafter.late(list(asks.values())))
        running = [asks[name] for name in order[:slots]]
        rule.ran([ask.request_id for ask in running], asks)
        drafts, verified = drafter.propose(running), []
        found.waited_s += drafter.waited_s
        found.passes, found.rounds = found.passes + 1, found.rounds + len(running)
        way.time_s += pass_s
        for ask, guesses in zip(running, drafts, strict=True):
            name, text, whole = ask.request_id, list(ask.tokens), wholes[ask.request_id]
            found.hits += bool(guesses)
            for guess in [*guesses, None]:
                text.append(whole[len(text)])
                if len(text) == len(whole) or text[-1] != guess:
                    break
            asks[name] = ask._replace(tokens=text)
            if len(text) < len(whole):
                verified.append(Verified(name, text, HIDDEN))
            else:
                del asks[name]
                drafter.forget(name)
        drafter.verified(verified)
    found.took_s = way.time_s - begun_s
    return found
