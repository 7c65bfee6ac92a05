"""The checker of the chaos suite can fail: streams doctored in every way that the promise excludes."""

import pytest

from tests.chaos.checker import Piece, problems

TOKENS = (5, 3, 8, 8, 1, 9)
GOOD = [
    Piece(0, (5, 3), "5.3."),
    Piece(2, (8,), "8."),
    Piece(3, (8, 1), "8.1."),
    Piece(5, (9,), "9.", finish="length"),
]


def decode(tokens: tuple[int, ...]) -> str:
    return "".join(f"{token}." for token in tokens)


def test_a_whole_stream_has_no_problems() -> None:
    assert problems(GOOD, TOKENS, decode) == []


def test_a_resumed_stream_is_held_to_the_rest() -> None:
    assert problems(GOOD[2:], TOKENS, decode, offset=3) == []
    assert problems(GOOD[2:], TOKENS, decode, offset=2) != []


def test_a_cancelled_stream_may_be_cut_and_nothing_else() -> None:
    cut = [*GOOD[:2], Piece(3, finish="cancelled")]
    assert problems(cut, TOKENS, decode, may_be_cut=True) == []
    assert problems(cut, TOKENS, decode) == ["ended as cancelled"]
    assert problems([GOOD[0], *cut[2:]], TOKENS, decode, may_be_cut=True) != []


def test_a_broken_stream_is_held_to_what_came() -> None:
    assert problems(GOOD[:2], TOKENS, decode, broken=True) == []
    assert problems([GOOD[0], GOOD[2]], TOKENS, decode, broken=True) != []


@pytest.mark.parametrize(
    ("stream", "problem"),
    [
        ([GOOD[0], *GOOD[2:]], "tokens lost"),
        ([*GOOD[:2], GOOD[1], *GOOD[2:]], "tokens repeated"),
        ([GOOD[0], Piece(2, (7,), "7."), *GOOD[2:]], "token 2 is 7, not 8"),
        ([Piece(0, (3, 5), "3.5."), *GOOD[1:]], "token 0 is 3, not 5"),
        ([GOOD[0], GOOD[2], GOOD[1], GOOD[3]], "tokens lost"),
        ([*GOOD[:2], Piece(3, (8,), "8."), Piece(4, finish="length")], "ended after 4 tokens"),
        (GOOD[:3], "never ended"),
        ([], "never ended"),
        ([*GOOD, Piece(6, finish="length")], "ended twice"),
        ([*GOOD, Piece(6, (1,), "1.")], "went on after its end"),
        ([*GOOD[:3], Piece(5, (9, 4), "9.4.", finish="length")], "one too many"),
        ([*GOOD[:3], Piece(5, (9,), "9.", finish="error")], "ended as error"),
        ([*GOOD[:3], Piece(5, (9,), "", finish="length")], "the text is"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_doctored_stream_is_found_out(stream: list[Piece], problem: str) -> None:
    assert any(problem in found for found in problems(stream, TOKENS, decode))
