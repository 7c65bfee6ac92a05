"""When refused clients are told to come again: one after the other, as room is made. Refuses nobody."""

MAX_AFTER_S = 60.0
MIN_AFTER_S = 0.1


class Retries:
    """If all refused clients came back as soon as there is room for one, most would be refused again. So each is told a
    time behind those that the clients before it were told, spaced by how long one request takes to be served. Nobody is
    promised a place."""

    def __init__(self) -> None:
        self._line_s = 0.0  # how long the line of clients is that were told to come, and are still to come
        self._at = 0.0

    def after_ms(self, now: float, room_s: float, request_s: float) -> int:
        """`room_s`: until there is room for one; `request_s`: from then on until there is room for another one."""
        self._line_s = max(0.0, self._line_s - max(0.0, now - self._at))
        self._at = now
        after_s = room_s + self._line_s
        if after_s < MAX_AFTER_S:
            self._line_s += request_s
        return round(1000 * min(max(after_s, MIN_AFTER_S), MAX_AFTER_S))
