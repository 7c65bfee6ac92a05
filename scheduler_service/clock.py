"""The time that a leader goes by. Which deadlines there are is not known here."""

import time

RATE = 0.1  # by how much this clock may go faster or slower than time passes


class SteadyClock:
    """Seconds since the Unix epoch. Where the machine's clock is set this one does not jump, so no request's deadline
    passes at once: it follows, by a tenth of a second each second."""

    def __init__(self) -> None:
        self._now, self._at = time.time(), time.monotonic()

    def __call__(self) -> float:
        at = time.monotonic()
        passed, self._at = at - self._at, at
        self._now += passed + min(max(time.time() - self._now - passed, -RATE * passed), RATE * passed)
        return self._now
