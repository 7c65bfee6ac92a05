"""The states of a client's stream, as two tables: what happens, which state follows, and what is done about it.

Everything that decides the state of a stream lives here; nothing else does. An event that the table does not allow
raises IllegalEvent and changes nothing. No asyncio, no messages, no clock.

`LIFE` says what the gateway still owes the scheduler for this stream. `FLOW` says how output tokens get into the
stream's buffer. FLOW applies only in the states ACCEPTED and CANCELLING of LIFE: the scheduler has acknowledged the
request and the client reads. Before that nothing comes for this stream, after that only the end matters.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeAlias, TypeVar


class Life(StrEnum):
    # The scheduler has not acknowledged the request: it may not know it, and it may refuse it.
    SUBMITTED = "submitted"
    SUBMITTED_CANCELLING = "submitted_cancelling"  # to be cancelled once acknowledged: the id may yet be another's
    SUBMITTED_CLOSING = "submitted_closing"  # the same, and the client is gone
    SUBMITTED_DETACHED = "submitted_detached"  # the client is gone; the request is to run on, so it must become durable
    # The scheduler has acknowledged the request: it is durable.
    ACCEPTED = "accepted"
    CANCELLING = "cancelling"  # the scheduler was told to cancel it; the client reads up to the end
    CLOSING = "closing"  # the same, and the client is gone; the end shows that the cancel has arrived
    # Nothing is owed any more. The client may still read what is in the buffer.
    ENDED = "ended"
    FAILED = "failed"  # after the buffer the client is told an error

    # Asked for each delta of each stream, so they are worked out once, in the constructor.
    live: bool
    accepted: bool
    read: bool  # a client reads it, or would if there were anything

    def __init__(self, name: str) -> None:
        self.live = name not in ("ended", "failed")
        self.accepted = name in ("accepted", "cancelling", "closing")
        self.read = name in ("submitted", "submitted_cancelling", "accepted", "cancelling")


class Event(StrEnum):
    # From the scheduler.
    ACCEPT = "accept"
    REFUSE = "refuse"  # for good; a refusal for now leads to LINK after a while
    DISPLACE = "displace"  # another request under this id was refused: the scheduler may have stopped this follow too
    END = "end"
    # From the client.
    CANCEL = "cancel"
    HANG_UP = "hang_up"  # the stream is over, and the request is to be cancelled
    DETACH = "detach"  # the stream is over, and the request is to run on
    STEP_ASIDE = "step_aside"  # the stream is over, and nothing is asked: others read the request, or it has ended
    # From the gateway.
    LINK = "link"  # the scheduler must hear of this stream: the stream is new, or the link, or it was refused for now
    GIVE_UP = "give_up"  # the client is told to try again; the request itself runs on


class Flow(StrEnum):
    FLOWING = "flowing"  # what comes continues the buffer
    FILLING = "filling"  # a follow is under way: tokens further on are dropped, since its answer repeats them
    BEHIND = "behind"  # the buffer is full: what comes is dropped, and followed again once the client has read
    BEHIND_ENDED = "behind_ended"  # the same, and the end was among what was dropped
    LOST = "lost"  # the answer to a follow left tokens out; the client is told so after the buffer
    COMPLETE = "complete"  # the end is in the buffer


class Step(StrEnum):
    # A delta arrives.
    NEXT = "next"  # tokens that continue the buffer
    FILL = "fill"  # the same; with them the buffer is full, or the follow has brought as many as it asked for
    AHEAD = "ahead"  # tokens that leave a gap: those in between are missing, or a follow's answer will bring them
    MISS = "miss"  # tokens that leave a gap, though only the answer to the follow could come: it has left tokens out
    END = "end"
    END_AHEAD = "end_ahead"  # an end behind tokens that are still missing
    # The gateway asks.
    DRAINED = "drained"  # the client has read all, and waits for more
    ASK = "ask"  # LIFE wants the stream followed


class Act(StrEnum):
    SUBMIT = "submit"
    CANCEL = "cancel"
    FOLLOW = "follow"  # ask for the output from where the buffer ends. In LIFE: do what FLOW answers to ASK
    FOLLOW_END = "follow_end"  # ask for nothing but the end
    KEEP = "keep"  # put it into the buffer. What is not kept is dropped


LifeMoves: TypeAlias = Mapping[Event, tuple[Life, tuple[Act, ...]]]
FlowMoves: TypeAlias = Mapping[Step, tuple[Flow, tuple[Act, ...]]]

LIFE: Mapping[Life, LifeMoves] = {
    Life.SUBMITTED: {
        Event.LINK: (Life.SUBMITTED, (Act.SUBMIT,)),
        Event.ACCEPT: (Life.ACCEPTED, ()),
        Event.REFUSE: (Life.FAILED, ()),
        Event.GIVE_UP: (Life.FAILED, ()),
        Event.CANCEL: (Life.SUBMITTED_CANCELLING, ()),
        Event.HANG_UP: (Life.SUBMITTED_CLOSING, ()),
        Event.DETACH: (Life.SUBMITTED_DETACHED, ()),
        Event.STEP_ASIDE: (Life.ENDED, ()),
    },
    Life.SUBMITTED_CANCELLING: {
        Event.LINK: (Life.SUBMITTED_CANCELLING, (Act.SUBMIT,)),
        Event.ACCEPT: (Life.CANCELLING, (Act.CANCEL,)),
        Event.REFUSE: (Life.FAILED, ()),
        Event.GIVE_UP: (Life.SUBMITTED_CLOSING, ()),  # the client is told, and the cancel is still owed
        Event.CANCEL: (Life.SUBMITTED_CANCELLING, ()),
        Event.HANG_UP: (Life.SUBMITTED_CLOSING, ()),
        Event.DETACH: (Life.SUBMITTED_CLOSING, ()),
        Event.STEP_ASIDE: (Life.ENDED, ()),
    },
    Life.SUBMITTED_CLOSING: {
        Event.LINK: (Life.SUBMITTED_CLOSING, (Act.SUBMIT,)),
        Event.ACCEPT: (Life.CLOSING, (Act.CANCEL,)),
        Event.REFUSE: (Life.ENDED, ()),
        Event.GIVE_UP: (Life.SUBMITTED_CLOSING, ()),
        Event.CANCEL: (Life.SUBMITTED_CLOSING, ()),
    },
    Life.SUBMITTED_DETACHED: {
        Event.LINK: (Life.SUBMITTED_DETACHED, (Act.SUBMIT,)),
        Event.ACCEPT: (Life.ENDED, ()),
        Event.REFUSE: (Life.ENDED, ()),
        Event.GIVE_UP: (Life.SUBMITTED_DETACHED, ()),
        Event.CANCEL: (Life.SUBMITTED_CLOSING, ()),
    },
    Life.ACCEPTED: {
        Event.LINK: (Life.ACCEPTED, (Act.FOLLOW,)),
        Event.ACCEPT: (Life.ACCEPTED, ()),
        Event.REFUSE: (Life.FAILED, ()),
        Event.DISPLACE: (Life.ACCEPTED, (Act.FOLLOW,)),
        Event.GIVE_UP: (Life.FAILED, ()),
        Event.END: (Life.ENDED, ()),
        Event.CANCEL: (Life.CANCELLING, (Act.CANCEL,)),
        Event.HANG_UP: (Life.CLOSING, (Act.FOLLOW_END, Act.CANCEL)),
        Event.DETACH: (Life.ENDED, ()),
        Event.STEP_ASIDE: (Life.ENDED, ()),
    },
    Life.CANCELLING: {
        Event.LINK: (Life.CANCELLING, (Act.FOLLOW, Act.CANCEL)),
        Event.ACCEPT: (Life.CANCELLING, ()),
        Event.REFUSE: (Life.FAILED, ()),
        Event.DISPLACE: (Life.CANCELLING, (Act.FOLLOW,)),
        Event.GIVE_UP: (Life.CLOSING, (Act.FOLLOW_END,)),  # the client is told, and the cancel must still arrive
        Event.END: (Life.ENDED, ()),
        Event.CANCEL: (Life.CANCELLING, (Act.CANCEL,)),
        Event.HANG_UP: (Life.CLOSING, (Act.FOLLOW_END,)),
        Event.DETACH: (Life.CLOSING, (Act.FOLLOW_END,)),
        Event.STEP_ASIDE: (Life.ENDED, ()),
    },
    Life.CLOSING: {
        Event.LINK: (Life.CLOSING, (Act.FOLLOW_END, Act.CANCEL)),
        Event.ACCEPT: (Life.CLOSING, ()),
        Event.REFUSE: (Life.ENDED, ()),
        Event.DISPLACE: (Life.CLOSING, (Act.FOLLOW_END,)),
        Event.GIVE_UP: (Life.CLOSING, ()),
        Event.END: (Life.ENDED, ()),
        Event.CANCEL: (Life.CLOSING, (Act.CANCEL,)),
    },
}

TOKENS = (Step.NEXT, Step.FILL, Step.AHEAD)

FLOW: Mapping[Flow, FlowMoves] = {
    Flow.FLOWING: {
        Step.NEXT: (Flow.FLOWING, (Act.KEEP,)),
        Step.FILL: (Flow.BEHIND, (Act.KEEP,)),
        Step.AHEAD: (Flow.FILLING, (Act.FOLLOW,)),
        Step.END: (Flow.COMPLETE, (Act.KEEP,)),
        Step.DRAINED: (Flow.FLOWING, ()),
        Step.ASK: (Flow.FILLING, (Act.FOLLOW,)),
    },
    Flow.FILLING: {
        Step.NEXT: (Flow.FLOWING, (Act.KEEP,)),
        Step.FILL: (Flow.BEHIND, (Act.KEEP,)),
        Step.AHEAD: (Flow.FILLING, ()),
        Step.END_AHEAD: (Flow.FILLING, ()),
        Step.MISS: (Flow.LOST, ()),
        Step.END: (Flow.COMPLETE, (Act.KEEP,)),
        Step.DRAINED: (Flow.FILLING, ()),
        Step.ASK: (Flow.FILLING, (Act.FOLLOW,)),
    },
    Flow.BEHIND: {
        **dict.fromkeys(TOKENS, (Flow.BEHIND, ())),
        Step.END: (Flow.BEHIND_ENDED, ()),
        Step.END_AHEAD: (Flow.BEHIND_ENDED, ()),
        Step.DRAINED: (Flow.FILLING, (Act.FOLLOW,)),
        Step.ASK: (Flow.BEHIND, (Act.FOLLOW_END,)),  # the scheduler must know that somebody waits
    },
    Flow.BEHIND_ENDED: {
        **dict.fromkeys((*TOKENS, Step.END, Step.END_AHEAD), (Flow.BEHIND_ENDED, ())),
        Step.DRAINED: (Flow.FILLING, (Act.FOLLOW,)),
        Step.ASK: (Flow.BEHIND, (Act.FOLLOW_END,)),  # the scheduler may have lost the end, and compute it once more
    },
    Flow.LOST: {
        **dict.fromkeys((*TOKENS, Step.END, Step.END_AHEAD, Step.DRAINED), (Flow.LOST, ())),
        Step.ASK: (Flow.LOST, (Act.FOLLOW_END,)),
    },
}

S = TypeVar("S", Life, Flow)
E = TypeVar("E", Event, Step)


class IllegalEvent(Exception):
    """An event that the table does not allow: a mistake of ours, never of a client or of the scheduler."""


def after(table: Mapping[S, Mapping[E, tuple[S, tuple[Act, ...]]]], state: S, event: E) -> tuple[S, tuple[Act, ...]]:
    """The state that `event` leads to, and what is done. Raises IllegalEvent."""
    try:
        return table[state][event]
    except KeyError:
        raise IllegalEvent(f"{event.value} is not possible in state {state.value}") from None


def mermaid(table: Mapping[S, Mapping[E, tuple[S, tuple[Act, ...]]]]) -> str:
    """The table as a state diagram: `state --> state : event, event / act, act`. Events that neither lead to another
    state nor have anything sent are left out."""
    arrows: dict[tuple[str, str, str], list[str]] = {}
    for state, moves in table.items():
        for event, (then, acts) in moves.items():
            if then is not state or acts:
                arrows.setdefault((state.value, then.value, ", ".join(acts)), []).append(event.value)
    drawn = ["stateDiagram-v2"]
    for (state_name, then_name, sent), events in arrows.items():
        said = f" / {sent}" if sent else ""
        drawn.append(f"    {state_name} --> {then_name} : {', '.join(events)}{said}")
    return "\n".join(drawn)
