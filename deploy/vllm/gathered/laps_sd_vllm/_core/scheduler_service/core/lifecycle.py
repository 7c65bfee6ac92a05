"""The life cycle of a request. Everything that decides a request's state lives in this table; nothing else does.

An illegal move raises and changes nothing. Where a request's KV is follows from its state: WAITING has none on any
worker, but perhaps a copy in the memory of its home's host; RUNNING and PAUSED have it on their home worker.
"""

from enum import Enum


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"  # ran in the last round of its worker
    PAUSED = "paused"  # preempted, KV kept
    FINISHED = "finished"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"

    @property
    def live(self) -> bool:
        return self in TRANSITIONS


class Move(Enum):
    RUN = "run"
    PREEMPT = "preempt"
    EVICT = "evict"  # its KV is gone: dropped or offloaded for memory, or its worker was lost or given up
    FINISH = "finish"
    CANCEL = "cancel"
    EXPIRE = "expire"
    FAIL = "fail"


_END = {Move.CANCEL: State.CANCELLED, Move.EXPIRE: State.EXPIRED, Move.FAIL: State.FAILED}

TRANSITIONS: dict[State, dict[Move, State]] = {
    State.WAITING: {Move.RUN: State.RUNNING, **_END},
    State.RUNNING: {Move.PREEMPT: State.PAUSED, Move.EVICT: State.WAITING, Move.FINISH: State.FINISHED, **_END},
    State.PAUSED: {Move.RUN: State.RUNNING, Move.EVICT: State.WAITING, **_END},
}


class IllegalMove(Exception):
    """A move that the table does not allow: a mistake of ours, never of a client."""


def after(state: State, move: Move) -> State:
    """The state that `move` leads to. Raises IllegalMove."""
    try:
        return TRANSITIONS[state][move]
    except KeyError:
        raise IllegalMove(f"{move.value} is not possible in state {state.value}") from None
