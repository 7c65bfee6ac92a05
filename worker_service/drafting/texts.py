"""The texts of all sessions as a drafter knows them: what is true, what it guesses after that, and which guess is
wanted first. Pure: blocks of KV are counted here, and nothing is computed; no messages and no bounds.

**Line**: tokens, and the KV of a beginning of them. A text has a main line, the truth with guesses after it, and
perhaps branches: the truth, some of the main line's guesses, and then another one.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from worker_service.engine.drafting.prefix import EMPTY, extended
from worker_service.engine.kv import KV, BlockPool


class Name(NamedTuple):
    """Of a text: whose it is, and the number that the session has for it."""

    session: int
    handle: int


class Wish(NamedTuple):
    """As the fields of Truth on the wire (draft_link.proto)."""

    need: int
    ahead: int
    fan: int = 1
    depth: int = 0


NO_WISH = Wish(0, 0)


class Guess(NamedTuple):
    """`tokens` that may follow the first `at` ones of a text, whose digest is `prefix`."""

    at: int
    prefix: int
    tokens: list[int]
    branch: bool


@dataclass(slots=True, eq=False)
class Line:
    """`goal`: how many tokens it is to have. `at`: those that a branch has in common with the main line. `others`: what
    else was likely in place of each of its last tokens."""

    tokens: "array[int]"
    kv: KV
    goal: int = 0
    at: int = 0
    others: list[list[int]] = field(default_factory=list)
    done: bool = False  # a main line that was whole since the last truth: its KV may have gone again

    @property
    def grows(self) -> bool:
        return len(self.tokens) < self.goal

    @property
    def missing(self) -> int:
        """How many tokens are to be computed. The last one only where a guess is wanted: its logits are the guess."""
        return max(len(self.tokens) - (not self.grows) - self.kv.length, 0)


@dataclass(slots=True, eq=False)
class Text:
    name: Name
    salt: str
    main: Line
    length: int = 0  # of the truth, which the main line begins with
    digest: int = EMPTY  # of the truth
    wish: Wish = NO_WISH
    branches: list[Line] = field(default_factory=list)
    forked: int = 0  # branches begin before this position already
    told: int = 0  # guesses of the main line that its worker was sent

    @property
    def chain(self) -> int:
        """How many guesses there are."""
        return len(self.main.tokens) - self.length

    @property
    def lines(self) -> list[Line]:
        return [self.main, *self.branches]

    def release(self) -> None:
        for line in self.lines:
            line.kv.release()


class Texts:
    """All texts, that with the newest truth last. `context_tokens`: of the longest line."""

    def __init__(self, pool: BlockPool, context_tokens: int) -> None:
        self.pool, self._context_tokens = pool, context_tokens
        self.by_name: dict[Name, Text] = {}
        self._busy: dict[Name, Text] = {}  # since their last truth something was still to be computed

    def learn(self, name: Name, start: int, new: "array[int]", wish: Wish, salt: str) -> Guess | None:
        """The truth is its first `start` tokens, which are there, and then `new`. `salt` is read the first time.
        Returns what is to be told now."""
        text = self.by_name.pop(name, None) or Text(name, salt, Line(array("i"), KV(self.pool, salt)))
        self.by_name[name] = self._busy[name] = text
        if start < text.length or new:
            self._follow(text, start, new)
        text.wish, text.main.done = wish, False
        text.main.goal = min(text.length + wish.ahead, self._context_tokens)
        for line in text.branches:
            line.goal = min(line.at + wish.depth, self._context_tokens)
        self._fork(text)
        return _telling(text)

    def _follow(self, text: Text, start: int, new: "array[int]") -> None:
        """Keep what agrees with the truth. The line that does so furthest becomes the main one."""
        before, text.length = text.length, start + len(new)
        agreed = {id(line): _agreement(line.tokens, start, new) for line in text.lines}
        old, main = text.main, max(text.lines, key=lambda line: agreed[id(line)])
        end, passed = agreed[id(main)], text.length - before
        goes_on = main is old and start == before and end == min(text.length, len(main.tokens))
        kept = [line for line in text.branches if goes_on and agreed[id(line)] == text.length <= line.at]
        for line in text.lines:
            if line is not main and line not in kept:
                line.kv.release()
        if end < text.length:
            main.kv.truncate(end)
            main.tokens = main.tokens[:start] + new
        text.digest = extended(*((text.digest, new) if start == before else (EMPTY, main.tokens[: text.length])))
        text.main, text.branches = main, kept
        if goes_on:
            text.told = max(text.told - passed, 0)
            text.forked = max(text.forked, text.length)
        else:
            told = main is not old and not main.grows  # a branch is told when it is whole
            text.told, text.forked = text.chain if told else 0, text.length
        main.others = main.others[max(len(main.others) - text.chain, 0) :]
        main.kv.publish(main.tokens[: text.length])

    def _fork(self, text: Text) -> None:
        """Begin the branches that are wanted where the main line's guesses are known."""
        wish, main = text.wish, text.main
        first = len(main.tokens) - len(main.others)
        end = min(text.length + wish.need + 1, len(main.tokens)) if wish.fan > 1 and wish.depth else 0
        for at in range(max(text.forked, first), end):
            for token in main.others[at - first][: wish.fan - 1]:
                tokens = main.tokens[:at] + array("i", [token])
                goal = min(at + wish.depth, self._context_tokens)
                text.branches.append(Line(tokens, KV(self.pool, text.salt), goal, at))
            text.forked = at + 1

    def forget(self, name: Name) -> None:
        text = self.by_name.pop(name, None)
        if text is not None:
            self._busy.pop(name, None)
            text.release()

    def forget_all(self, session: int) -> None:
        for name in [name for name in self.by_name if name.session == session]:
            self.forget(name)

    def wanted(self) -> list[tuple[Text, Line]]:
        """The lines that something is to be computed of, the first one first: texts without a usable chain, then other
        main lines, then branches; of these the one that has waited longest."""
        ranked: list[tuple[int, Text, Line]] = []
        for name, text in list(self._busy.items()):
            before = len(ranked)
            text.main.done |= not text.main.missing
            if not text.main.done:
                lacks = text.main.grows and text.chain < text.wish.need
                ranked.append((0 if lacks else 1, text, text.main))
            ranked += [(2, text, line) for line in text.branches if line.grows]
            if len(ranked) == before:
                del self._busy[name]
        ranked.sort(key=lambda each: each[0])
        return [(text, line) for _, text, line in ranked]

    def grow(self, text: Text, line: Line, likeliest: Sequence[int]) -> Guess | None:
        """A guess of a line was made, `likeliest` first. Returns what is to be told now."""
        line.tokens.append(likeliest[0])
        line.others.append(list(likeliest[1:]))
        if line is text.main:
            self._fork(text)
            return _telling(text)
        if line.grows:
            return None
        prefix = extended(text.digest, line.tokens[text.length : line.at])
        return Guess(line.at, prefix, line.tokens[line.at :].tolist(), branch=True)

    def make_room(self, line: Line, tokens: int, order: Sequence[tuple[Text, Line]], place: int) -> bool:
        """Whether `line`, which has this place in the order, has room for so many tokens, if need be after others have
        lost their KV: idle texts, the one with the oldest truth first, and for a main line then those behind it, the
        last one first, and what is whole of other texts."""
        if line.kv.room >= tokens:
            return True
        for other in self._victims(order, place):
            other.kv.release()
            if line.kv.room >= tokens:
                return True
        return False

    def _victims(self, order: Sequence[tuple[Text, Line]], place: int) -> Iterator[Line]:
        for name, text in self.by_name.items():
            if name not in self._busy:
                yield from text.lines
        text, line = order[place]
        if line is text.main:
            yield from (other for _, other in reversed(order[place + 1 :]))
            wanted = {id(other) for _, other in order}
            yield from (other for each in self._busy.values() for other in each.lines if id(other) not in wanted)


def _telling(text: Text) -> Guess | None:
    """The main chain, if it has become of use or whole since it was told last."""
    chain = text.main.tokens[text.length : text.main.goal].tolist()
    if text.told < text.wish.need <= len(chain) or (text.told < len(chain) and not text.main.grows):
        text.told = len(chain)
        return Guess(text.length, text.digest, chain, branch=False)
    return None


def _agreement(tokens: "array[int]", start: int, new: "array[int]") -> int:
    """How far `tokens` are the truth, whose first `start` ones they have."""
    for at, (own, true) in enumerate(zip(tokens[start : start + len(new)], new, strict=False), start):
        if own != true:
            return at
    return min(len(tokens), start + len(new))
