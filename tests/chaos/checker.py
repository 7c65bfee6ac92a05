"""Whether what a client saw of a request is what was promised. Pure: no stack, no clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

WHOLE, CANCELLED = "length", "cancelled"


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk of a stream. `finish`: the reason on the last one, else empty."""

    offset: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    finish: str = ""


def problems(
    pieces: Sequence[Piece],
    expected: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    *,
    offset: int = 0,
    may_be_cut: bool = False,
    broken: bool = False,
) -> list[str]:
    """What is wrong with a stream from token `offset` on; empty: nothing.

    `expected`: the whole output. `may_be_cut`: the request was cancelled, or its client was cut off, so that it may
    have ended early. `broken`: the connection broke, and this is what came until then.
    """
    found: list[str] = []
    at, finish = offset, ""
    for piece in pieces:
        if finish:
            found.append("ended twice" if piece.finish else "went on after its end")
        if piece.offset != at:
            found.append(f"tokens {'repeated' if piece.offset < at else 'lost'}: at {at} came {piece.offset}")
        at = piece.offset
        for token in piece.tokens:
            if at >= len(expected):
                found.append(f"token {at} is one too many")
            elif token != expected[at]:
                found.append(f"token {at} is {token}, not {expected[at]}")
            at += 1
        finish = piece.finish or finish
    if not finish and broken:
        return found
    if not finish:
        found.append(f"never ended, after {at} tokens of {len(expected)}")
    elif finish == WHOLE:
        if at < len(expected):
            found.append(f"ended after {at} tokens of {len(expected)}")
    elif finish != CANCELLED or not may_be_cut:
        found.append(f"ended as {finish}")
    # A resumed stream may begin within a character.
    if not found and offset == 0 and (text := "".join(piece.text for piece in pieces)) != decode(expected[:at]):
        found.append(f"the text is {text!r}, not {decode(expected[:at])!r}")
    return found
