"""What a pass of the target takes, by the tokens that it computes, and which drafts are worth a place in it. Learned
from passes; no clock lives here.

Rows of a pass do not cost alike. The weights are read once for some rows together: those that fill up such a group come
nearly free, and the next one is dear. A line through all of it is wrong at either end.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import log2

_EACH, _STEP, _MOST = 32, 8, 512  # rows: each number up to the first, then in steps, as far as the last
_SHARE = 0.15  # of what a pass tells, in what is known of passes of as many rows
_ALL = 0.5  # of that share, in what is known of all others: a busy machine makes every pass slower
_SURPRISE = 0.5  # a pass that takes longer by more than this share is an outlier, and counts as much
_GAIN = 1.03  # drafts must promise so much more than none: what is known is not exact
_LEAST_PRICE, _MOST_PRICE = 0.1, 0.9
_PROBE = 64  # passes: in one of so many all drafts are verified, for costs may have changed
_ROWS: list[int] = [*range(1, _EACH + 1), *range(_EACH + _STEP, _MOST + 1, _STEP)]


@cache
def _near(rows: int) -> list[float]:
    """How much of what a pass of so many rows tells counts for each of _ROWS."""
    return [max(1 - 4 * abs(log2(rows / other)), _ALL) for other in _ROWS]


class PassCosts:
    """Seconds by rows, which never fall from one number of rows to the next. Not thread-safe."""

    def __init__(self, first_s: float, row_s: float) -> None:
        """What a pass of one row takes, and each further row, for a beginning."""
        self._seconds: list[float] = [max(first_s, 1e-6) + row_s * (rows - 1) for rows in _ROWS]
        self._draft_s = 0.0  # of a step, in the mean
        self._position_s = 0.0  # of a position drafted for all
        self._passes = 0

    def seconds(self, rows: int) -> float:
        if rows <= _EACH:
            return self._seconds[max(rows, 1) - 1]
        i = bisect_left(_ROWS, min(rows, _MOST))
        if rows >= _MOST:
            last, before = self._seconds[-1], self._seconds[_EACH - 1]
            return last + (rows - _MOST) * (last - before) / (_MOST - _EACH)
        right = (rows - _ROWS[i - 1]) / (_ROWS[i] - _ROWS[i - 1])
        return self._seconds[i - 1] + right * (self._seconds[i] - self._seconds[i - 1])

    def observe(self, rows: int, seconds: float, draft_s: float, position_s: float) -> None:
        """A pass of so many rows, without a prefill; what was spent on its drafts, and is on each position of them."""
        self._position_s = position_s
        self._draft_s += _SHARE * (draft_s - self._draft_s)
        if rows > _MOST:
            return
        surprise = _SHARE * max(min(seconds / self.seconds(rows) - 1, _SURPRISE), -_SURPRISE)
        learned = [known * (1 + surprise * share) for known, share in zip(self._seconds, _near(rows), strict=True)]
        at = bisect_left(_ROWS, rows)
        # The number of rows that was seen is right, where its neighbours are not in order with it.
        for i in range(at - 1, -1, -1):
            learned[i] = min(learned[i], learned[i + 1])
        self._seconds = learned[:at] + list(accumulate(learned[at:], max))

    def price(self, tokens: int, rows: int, most: int) -> tuple[float, float]:
        """Of a pass that would compute `rows` without drafts, and emit `tokens`: the chance of being right below which
        none of at most `most` drafts can pay; and the tokens that it would make while one position is drafted."""
        second = tokens / (self.seconds(rows) + self._draft_s)
        counts = [1 << i for i in range(max(most, 1).bit_length())]
        least = min((self.seconds(rows + count) - self.seconds(rows)) / count for count in counts)
        return min(max(second * least, _LEAST_PRICE), _MOST_PRICE), second * self._position_s

    def cut(self, chances: Sequence[float], tokens: int, rows: int) -> float:
        """From which of these chances on drafts are verified, in such a pass: so that it makes most tokens a second."""
        self._passes += 1
        if self._passes % _PROBE == 0:
            return 0.0
        rate = _GAIN * tokens / (self.seconds(rows) + self._draft_s)
        cut, gain = 2.0, 0.0
        for count, chance in enumerate(sorted(chances, reverse=True), 1):
            gain += chance
            if (better := (tokens + gain) / (self.seconds(rows + count) + self._draft_s)) > rate:
                rate, cut = better, chance
        return cut
