"""The time that a leader goes by. Which deadlines there are is not known here."""

import time

RATE = 0.1  # by how much this clock may go faster or slower than time passes
EVERY_S = 1.0  # the machine's clock is looked at


class SteadyClock:
    """Seconds since the Unix epoch. When the machine's clock is set, this clock does not jump, so deadlines do not pass
    all at once. It approaches the machine's clock by a tenth of a second each second."""

    def __init__(self) -> None:
        self._now, self._at = time.time(), time.monotonic()
        self._slope = 0.0

    def __call__(self) -> float:
        passed = time.monotonic() - self._at
        now = self._now + passed + self._slope * min(passed, EVERY_S)
        if passed >= EVERY_S:
            self._now, self._at = now, self._at + passed
            self._slope = min(max((time.time() - now) / EVERY_S, -RATE), RATE)
        return now
