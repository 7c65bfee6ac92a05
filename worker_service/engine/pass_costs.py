"""What a pass of the target takes, by the tokens that it computes, and how many drafts are worth a place in it. Learned
from passes; no clock lives here.

Rows of a pass do not cost alike. The weights are read once for some rows together: those that fill up such a group come
nearly free, and the next one is dear. A line through all of it is wrong at either end.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import log2

_MOST = 512  # rows that are told apart; passes of more teach nothing, and cost on as these do
_SHARE = 0.15  # of what a pass tells, in what is known of passes of as many rows
_ALL = 0.5  # of that share, in what is known of all others: a busy machine makes every pass slower
_NEAR = 0.125  # in powers of two: rows so near learn more than that
_SURPRISE = 0.5  # a pass that takes longer by more than this share is an outlier, and counts as much
_GAIN = 1.03  # drafts must promise so much more than none: what is known is not exact
_LEAST_PRICE, _MOST_PRICE = 0.1, 0.9
_LEAST_S, _MOST_S = 1e-6, 1e4
_PROBE = 64  # steps with drafts: in one of so many all are verified, for costs may have changed


class PassCosts:
    """Seconds by rows, which never fall from one number of rows to the next. Used in one thread."""

    def __init__(self, first_s: float, row_s: float) -> None:
        """What a pass of one row takes, and each further row, for a beginning."""
        self._seconds: list[float] = [max(first_s + row_s * more, _LEAST_S) for more in range(_MOST)]
        self._draft_s = 0.0  # of a step, in the mean
        self._position_s = 0.0  # of a position drafted for all
        self._steps = 0

    def seconds(self, rows: int) -> float:
        if rows <= _MOST:
            return self._seconds[max(rows, 1) - 1]
        last, half = self._seconds[-1], self._seconds[_MOST // 2 - 1]
        return last + (rows - _MOST) * (last - half) / (_MOST - _MOST // 2)

    def observe(self, rows: int, seconds: float, draft_s: float, position_s: float) -> None:
        """A pass of so many rows, without a prefill; what was spent on its drafts, and is on each position of them."""
        self._position_s = position_s
        self._draft_s += _SHARE * (draft_s - self._draft_s)
        if not 0 < rows <= _MOST:
            return
        change = 1 + _SHARE * max(min(seconds / self.seconds(rows) - 1, _SURPRISE), -_SURPRISE)
        # As powers of one change, what rows learn cancels out alike where passes are now faster, now slower.
        learned = [min(max(known * change**_ALL, _LEAST_S), _MOST_S) for known in self._seconds]
        for other in range(max(int(rows / 2**_NEAR), 1), min(int(rows * 2**_NEAR) + 1, _MOST) + 1):
            share = max(1 - (1 - _ALL) * abs(log2(rows / other)) / _NEAR, _ALL)
            learned[other - 1] = min(max(self._seconds[other - 1] * change**share, _LEAST_S), _MOST_S)
        # The number of rows that was seen is right, where its neighbours are not in order with it.
        fewer = [min(known, learned[rows - 1]) for known in learned[: rows - 1]]
        self._seconds = list(accumulate(fewer + learned[rows - 1 :], max))

    def price(self, tokens: int, rows: int, most: int) -> tuple[float, float]:
        """Of a step that would emit `tokens` by a pass of `rows` without drafts, and may have `most`: the chance of
        being right, in the mean, that drafts must have to pay where they are cheapest; and the tokens that all requests
        would get while one position is drafted for them. Now and then next to nothing, for costs may have changed: the
        next `worth` then takes all."""
        self._steps += 1
        if self._probes:
            return _LEAST_PRICE, 0.0
        second = tokens / (self.seconds(rows) + self._draft_s)
        counts = [1 << i for i in range(max(most, 1).bit_length())]
        least = min((self.seconds(rows + count) - self.seconds(rows)) / count for count in counts)
        return min(max(second * least, _LEAST_PRICE), _MOST_PRICE), second * self._position_s

    def worth(self, chances: Sequence[float], tokens: int, rows: int) -> int:
        """How many of the likeliest of these drafts such a pass verifies, so that it makes most tokens a second."""
        if self._probes:
            return len(chances)
        rate = _GAIN * tokens / (self.seconds(rows) + self._draft_s)
        best, gain = 0, 0.0
        for count, chance in enumerate(sorted(chances, reverse=True), 1):
            gain += chance
            if (better := (tokens + gain) / (self.seconds(rows + count) + self._draft_s)) > rate:
                rate, best = better, count
        return best

    @property
    def _probes(self) -> bool:
        return self._steps % _PROBE == _PROBE - 1
