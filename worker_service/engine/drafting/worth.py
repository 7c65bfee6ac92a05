"""What guesses from elsewhere are worth: how many of a chain to verify, and whether to wait for one. It counts what it
is told, and knows no clock."""

from collections import deque
from collections.abc import Iterable

SHARE = 0.05  # of the newest observation in a running mean
FIRST_RIGHT = 0.7  # taken for the chance of a guess before any was judged
LEAST_CHANCE = 0.15  # of a guess and all before it to be right: less likely ones are not worth their verification
PROBE_ROUNDS = 32  # where no guess is worth it, one is tried in so many rounds
PASSES = 15  # of which the median counts
MOST_IN_VAIN = 2  # waits; then none before a chain that fits is there


def fan_of(step: float, chain: float, requests: int, need: int) -> int:
    """How many guesses at each position where a pass may end a drafter has time for, while it drafts `need` tokens for
    each of so many requests. `step`: what a token of one chain takes, `chain`: what each further chain adds to that.

    Two where all chains together make a step at most five times as long, for the second guess is often the right one;
    three or four where it stays below one and a half; else 0: the main chain alone. A further chain counts as a 256th
    of a step at least, since one that was measured to take nothing still takes memory and time to look at. The
    simulator has the same function: scheduler_service/sim/drafter.py.
    """
    for fan in (4, 3, 2):
        further = requests * (1 + (need + 1) * (fan - 1)) - 1
        if max(chain, step / 256) * further <= (4.0 if fan == 2 else 0.5) * step:
            return fan
    return 0


class Worth:
    """Of all chains of one worker's drafter elsewhere."""

    def __init__(self) -> None:
        self.right = FIRST_RIGHT  # the chance of a guess, where all before it are right
        self.delay_s: float | None = None  # from telling a text to its chain; None: none has come yet
        self.there = 1.0  # the share of rounds in which a chain was there when it was wanted
        self._passes: deque[float] = deque(maxlen=PASSES)
        self._tokens = 0.0  # of a pass, all requests together
        self._in_vain = 0
        self._kept = 1.0  # the chance that a wait brings what it is for
        self._rounds = 0

    def judged(self, right: int, of: int) -> None:
        """Of `of` guesses of a chain the first `right` were; what comes after a wrong one was not judged."""
        for hit in [1.0] * right + [0.0] * (right < of):
            self.right += SHARE * (hit - self.right)

    def passed(self, took_s: float, tokens: int) -> None:
        """A pass of the target, and what it emitted."""
        self._tokens += (SHARE if self._passes else 1.0) * (tokens - self._tokens)
        self._passes.append(took_s)

    def looked(self, there: bool) -> None:
        """For a request's chain, in a round. One that fits the text says that waiting may be of use again."""
        self.there += SHARE * (there - self.there)
        if there:
            self._in_vain = 0
            self._kept += SHARE * (1 - self._kept)

    def soon(self, since_s: float) -> bool:
        """Whether a chain whose text was told so many seconds ago is due within a pass, and is not overdue by one."""
        if self.delay_s is None or not self._passes:
            return False
        return -self.pass_s <= self.delay_s - since_s <= self.pass_s

    def arrived(self, took_s: float) -> None:
        """A chain, so long after its text was told."""
        self.delay_s = took_s if self.delay_s is None else self.delay_s + 4 * SHARE * (took_s - self.delay_s)

    def waited(self, brought: bool) -> None:
        """A wait is over. `brought`: it brought guesses that fit; whatever else came is no reason to wait again."""
        self._in_vain = 0 if brought else self._in_vain + 1
        self._kept += 4 * SHARE * (brought - self._kept)

    def length(self, most: int) -> int:
        """How many guesses of a chain are worth verifying, at most `most`."""
        chance, length = self.right, 0
        while length < most and chance >= LEAST_CHANCE:
            chance, length = chance * self.right, length + 1
        return length

    def probe(self) -> int:
        """How many to verify in a round though none is worth it: one now and then, for that may change."""
        self._rounds += 1
        return int(self._rounds % PROBE_ROUNDS == 0)

    def gain(self, length: int) -> float:
        """Tokens to be expected of so many guesses."""
        return sum(self.right**position for position in range(1, length + 1))

    @property
    def patience_s(self) -> float:
        """The longest wait before a pass: half of one. 0: none now."""
        if self._in_vain >= MOST_IN_VAIN or not self._passes:
            return 0.0
        return self.pass_s / 2

    @property
    def pass_s(self) -> float:
        """The median; 0 before the first."""
        return sorted(self._passes)[len(self._passes) // 2] if self._passes else 0.0

    def pays(self, late: Iterable[tuple[float, float]], left_s: float) -> bool:
        """Whether to wait, for at most `left_s`, while all requests stand still. `late`: for each chain that is due the
        seconds since its text was told, and the tokens that it would bring."""
        if self.delay_s is None or not self._passes:
            return False
        per_s = self._tokens / max(self.pass_s, 1e-9)
        extra = 0.0
        # One that is overdue comes soon, or not at all.
        waits = sorted((max(self.delay_s - since_s, self.delay_s / 4), gain) for since_s, gain in late)
        for wait_s, gain in waits:
            extra += gain
            cost_s = self._kept * wait_s + (1 - self._kept) * left_s
            if wait_s <= left_s and extra * self._kept > cost_s * per_s:
                return True
        return False
