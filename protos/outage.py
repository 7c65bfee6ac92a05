"""Decides which failures of a connection are logged: of each outage every reason once. No connection lives here."""

_MOST = 4  # reasons told of one outage


class Outage:
    """An outage lasts from the end of a connection, or from the start, until the next connection."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def is_new(self, reason: str) -> bool:
        """Whether to tell this reason: it was not told since the last connection. An outage may begin with a port that
        is closed and go on for another cause; reasons that are always worded anew are told a few times."""
        if reason in self._told or len(self._told) == _MOST:
            return False
        self._told.add(reason)
        return True

    def over(self) -> bool:
        """There is a connection. Whether anything was told of the outage."""
        was_told = bool(self._told)
        self._told.clear()
        return was_told
