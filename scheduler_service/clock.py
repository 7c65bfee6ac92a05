"""The time that a leader goes by. Which deadlines there are is not known here."""

import time
from collections.abc import Callable


def steady_clock() -> Callable[[], float]:
    """Seconds since the Unix epoch, by what the machine's clock says now: one that is set later changes nothing, so no
    request's deadline passes before its time."""
    began = time.time() - time.monotonic()
    return lambda: began + time.monotonic()
