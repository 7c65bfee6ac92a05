"""The life-cycle table: what may follow what."""

import pytest

from scheduler_service.core.lifecycle import TRANSITIONS, IllegalMove, Move, State, after


@pytest.mark.parametrize(
    ("state", "move", "then"), [(s, m, t) for s, moves in TRANSITIONS.items() for m, t in moves.items()]
)
def test_a_move_of_the_table_leads_where_it_says(state: State, move: Move, then: State) -> None:
    assert after(state, move) is then


@pytest.mark.parametrize("state", [state for state in State if not state.live])
@pytest.mark.parametrize("move", list(Move))
def test_nothing_follows_an_end(state: State, move: Move) -> None:
    with pytest.raises(IllegalMove):
        after(state, move)


def test_only_a_running_request_is_preempted_or_finishes() -> None:
    for move in (Move.PREEMPT, Move.FINISH):
        assert [state for state in TRANSITIONS if move in TRANSITIONS[state]] == [State.RUNNING]


def test_every_live_request_can_be_cancelled_and_expire() -> None:
    for moves in TRANSITIONS.values():
        assert moves[Move.CANCEL] is State.CANCELLED
        assert moves[Move.EXPIRE] is State.EXPIRED
