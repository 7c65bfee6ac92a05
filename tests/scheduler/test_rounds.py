"""A stored log gives back every round as it was, and says when it is cut short."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.round_log import MARK_EVERY, RoundLog
from scheduler_service.store.rounds import LoggedRound, decode, encode

ROUNDS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2**32 - 1), max_size=9),
        st.integers(0, 255),
        st.integers(0, 255),
        st.binary(max_size=40),
    )
)


@given(ROUNDS)
def test_what_is_encoded_comes_back(rounds: list[tuple[list[int], int, int, bytes]]) -> None:
    log = b"".join(encode(*round) for round in rounds)
    start, expected = 0, []
    for tokens, drafted, accepted, logprobs in rounds:
        expected.append(LoggedRound(start, tuple(tokens), drafted, accepted, logprobs))
        start += len(tokens)
    assert list(decode(log)) == expected


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_a_log_that_is_cut_short_is_an_error(cut: int) -> None:
    log = encode([1, 2], 1, 1, b"12345")
    with pytest.raises(struct.error):
        list(decode(log[:-cut]))


@pytest.mark.parametrize("count", [0, 1, MARK_EVERY, 2 * MARK_EVERY + 3, 999])
def test_the_last_rounds_are_found_from_a_mark(count: int) -> None:
    rounds = [((1,) * (number % 3), number % 5, number % 2) for number in range(2 * MARK_EVERY + 5)]
    log = RoundLog(b"".join(encode(*round) for round in rounds))
    expected = [(len(tokens), drafted, accepted) for tokens, drafted, accepted in rounds]
    assert log.shapes() == expected
    assert log.last(count) == expected[len(expected) - min(count, len(expected)) :]
