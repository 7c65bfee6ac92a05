"""When those who are refused are told to come again: one after the other, as room is made. Refuses nobody."""

MAX_AFTER_S = 60.0
MIN_AFTER_S = 0.1


class Retries:
    """Nobody is promised a place; but if all came back when there is room for one, most would be refused again. So each
    is given a turn behind the turns given before, which pass at the pace at which work gets done."""

    def __init__(self) -> None:
        self._given_s = 0.0  # of turns that have not passed yet
        self._at = 0.0

    def after_ms(self, now: float, room_s: float, request_s: float) -> int:
        """`room_s`: until there is room for one; `request_s`: until there is for another one."""
        self._given_s = max(0.0, self._given_s - max(0.0, now - self._at))
        self._at = now
        after_s = room_s + self._given_s
        if after_s < MAX_AFTER_S:
            self._given_s += request_s
        return round(1000 * min(max(after_s, MIN_AFTER_S), MAX_AFTER_S))
