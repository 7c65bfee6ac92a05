"""The seconds of a pass of the target by its rows, which are the tokens that it computes; and how many drafts are worth
a place in it. Passes teach it; no clock lives here.

Rows of a pass do not cost alike. The weights are read once for some rows together: those that fill up such a group come
nearly free, and the next one is dear. A line through all of it is wrong at either end.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]

_MOST = 512  # rows that are told apart. Passes of more rows teach nothing
_ROWS = np.arange(1.0, _MOST + 1)
_SHARE = 0.15  # of a surprise that is learned for as many rows as the pass had
_NEW = 3.0  # times that share, where no pass of about so many rows was seen lately
_ALL = 0.5  # of that share, which is learned for all other rows: a busy machine makes every pass slower
_NEAR = 0.125  # in powers of two: rows so near to those of the pass learn more than that
_SURPRISE = 0.5  # the largest: a pass that took longer by a greater share counts as if by this one
_FADING, _SEEN = 0.99, 0.05  # with each pass older ones count less; rows that count for more than this are recent
_GAIN = 1.03  # drafts must promise so much more than none: what is known is not exact
_LEAST_PRICE, _MOST_PRICE = 0.03, 0.9
_LEAST_S, _MOST_S = 1e-6, 1e4
_PROBE = 64  # steps with drafts: in one of so many more are verified than pay, for costs may have changed
_FEWER = 16  # and in one of so many fewer, if such a pass was not seen for long: that counts for less than _LONG
_LONG = 0.2
_PROBE_ROWS, _PROBE_TIMES = 8, 2.0  # so many at least, and as many as make the pass so many times as long


@lru_cache(maxsize=64)
def _near(rows: int) -> _Floats:
    """How much a pass of so many rows tells of passes of each of _ROWS: from 1 for as many to 0."""
    return np.maximum(1 - np.abs(np.log2(_ROWS / rows)) / _NEAR, 0.0)


class PassCosts:
    """Seconds by rows, which never fall from one number of rows to the next. Used in one thread."""

    def __init__(self, first_s: float, row_s: float, measured: Mapping[int, float] | None = None) -> None:
        """Seconds of a pass of one row, and of each further row, until passes have taught better; or those that were
        `measured` for some numbers of rows, between these along straight lines, and `row_s` for each row more."""
        points = sorted({1: first_s, **(measured or {})}.items())
        rows, seconds = np.array(points).T
        further = row_s * np.maximum(_ROWS - rows[-1], 0)
        least = np.minimum.accumulate(seconds[::-1])[::-1]  # what more rows took so few at most: noise only adds
        known = np.interp(_ROWS, rows, least) + further
        self._known: _Floats = np.maximum(known, _LEAST_S)
        self._seen: _Floats = np.zeros(_MOST)
        self._seconds: list[float] = self._known.tolist()
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
        surprise = max(min(seconds / float(self._known[rows - 1]) - 1, _SURPRISE), -_SURPRISE)
        own = max(1.0, _NEW / (1 + self._seen_near(rows)))
        # As powers: where passes are now faster, now slower, what rows learn of them cancels out for all alike.
        known = self._known * (1 + _SHARE * surprise) ** (_ALL + (own - _ALL) * _near(rows))
        self._known = np.minimum(np.maximum(known, _LEAST_S), _MOST_S)
        self._seen *= _FADING
        self._seen[rows - 1] += 1
        self._seconds = self._in_order().tolist()

    def _in_order(self) -> _Floats:
        """Seconds by rows that never fall. The rows of recent passes set the bounds; for rows between them the seconds
        that are known are cut to these bounds."""
        seen = self._seen > _SEEN
        least = np.maximum.accumulate(np.where(seen, self._known, 0.0))
        most = np.minimum.accumulate(np.where(seen, least, np.inf)[::-1])[::-1]
        between: _Floats = np.minimum(np.maximum(self._known, least), most)
        return np.maximum.accumulate(between)

    def price(self, tokens: int, rows: int, most: int) -> tuple[float, float]:
        """Of a step that would emit `tokens` by a pass of `rows` without drafts, and may have `most`: the chance that
        drafts must have in the mean to pay, for as many drafts as make a row cheapest; and the tokens that all requests
        would get while one position is drafted for them.

        Some steps are probes, for costs may have changed. In one of _PROBE both are next to nothing, and `worth` takes
        more drafts than pay; in one of _FEWER it takes fewer, if passes of so few rows were not seen for long."""
        self._steps += 1
        if self._probes:
            return _LEAST_PRICE, 0.0
        alone_s = self.seconds(rows)
        second = tokens / (alone_s + self._draft_s)
        counts = [1 << i for i in range(max(most, 1).bit_length())]
        least = second * min((self.seconds(rows + count) - alone_s) / count for count in counts)
        return min(max(least, _LEAST_PRICE), _MOST_PRICE), second * self._position_s

    def worth(self, chances: Sequence[float], tokens: int, rows: int) -> int:
        """How many of the likeliest of these drafts such a pass verifies, so that it makes most tokens a second."""
        alone_s = self.seconds(rows)
        rate, best, gain = _GAIN * tokens / (alone_s + self._draft_s), 0, 0.0
        for count, chance in enumerate(sorted(chances, reverse=True), 1):
            seconds, gain = self.seconds(rows + count), gain + chance
            if self._probes:
                best = count if count <= _PROBE_ROWS or seconds <= _PROBE_TIMES * alone_s else best
            elif (better := (tokens + gain) / (seconds + self._draft_s)) > rate:
                rate, best = better, count
        turn, at = divmod(self._steps, _FEWER)
        if at == _FEWER // 2:
            fewer = best >> (1 + turn % 3)
            if 0 < rows + fewer <= _MOST and self._seen_near(rows + fewer) < _LONG:
                return fewer
        return best

    def _seen_near(self, rows: int) -> float:
        """How many passes of about so many rows there were lately."""
        return float(_near(rows) @ self._seen)

    @property
    def _probes(self) -> bool:
        return self._steps % _PROBE == _PROBE - 1
