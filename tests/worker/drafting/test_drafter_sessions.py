"""What a session may say and be owed: every bound, and what the worker is told when one is reached. No model."""

from typing import Any

import pytest

from protos.errors import BadInput
from protos.link.v1 import draft_link_pb2 as pb
from worker_service.drafting.session import LONGEST_CHAIN, WIDEST_FAN, Bounds, Session
from worker_service.drafting.texts import Guess, Wish

BOUNDS = Bounds(context_tokens=100, vocab_size=50, handles=3, tokens=250)


def truths(*rows: dict[str, Any]) -> pb.Truths:
    return pb.Truths(rows=[pb.Truth(**row) for row in rows])


def opened(**more: Any) -> Session:
    session = Session(BOUNDS)
    session.read(truths({"handle": 1, "tokens": [1, 2, 3], **more}))
    return session


def test_a_truth_becomes_an_edit() -> None:
    row = {"handle": 7, "tokens": [4, 5], "need": 2, "ahead": 6, "fan": 3, "depth": 2, "salt": b"s" * 16}
    (edit,) = Session(BOUNDS).read(truths(row))
    assert (edit.handle, edit.start, edit.tokens.tolist()) == (7, 0, [4, 5])
    assert (edit.wish, edit.salt) == (Wish(2, 6, 3, 2), "73" * 16)


def test_without_a_salt_a_text_shares_with_none() -> None:
    edits = Session(BOUNDS).read(truths({"handle": 1}, {"handle": 2}))
    assert len({edit.salt for edit in edits}) == 2


def test_what_is_over_is_over_and_unknown_to_the_next_truth() -> None:
    session = opened()
    (edit,) = session.read(truths({"handle": 1, "forget": True}))
    assert (edit.handle, edit.wish) == (1, None)
    assert session.read(truths({"handle": 1, "start": 3, "tokens": [4]}, {"handle": 1, "forget": True})) == []


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"handle": 0, "tokens": [1]}, "handle: counts from 1"),
        ({"handle": 9, "start": 3, "tokens": [4]}, "handle: 9 never was one"),
        ({"handle": 9, "forget": True}, "handle: 9 never was one"),
        ({"handle": 1, "start": 3, "tokens": [50]}, "tokens: handle 1 has an id that is not below 50"),
        ({"handle": 1, "start": 3, "tokens": [2**32 - 1]}, "not below 50"),
        ({"handle": 1, "start": 3, "tokens": [1] * 100_000}, "tokens: handle 1 has 100003; the context is 100"),
        ({"handle": 1, "start": 2**32 - 1}, "the context is 100"),
        ({"handle": 2, "salt": b"short"}, "salt: has 5 bytes"),
        ({"handle": 1, "ahead": LONGEST_CHAIN + 1}, "ahead: "),
        ({"handle": 1, "need": 2, "ahead": 1}, "ahead: "),
        ({"handle": 1, "depth": LONGEST_CHAIN + 1}, "ahead: "),
        ({"handle": 1, "fan": WIDEST_FAN + 1}, "fan: "),
    ],
)
def test_garbage_is_refused_with_the_field(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        opened().read(truths(row))


def test_handles_and_rows_are_bounded() -> None:
    session = Session(BOUNDS)
    session.read(truths(*({"handle": handle} for handle in (1, 2, 3))))
    with pytest.raises(BadInput, match=r"handle: 4 .* 3"):
        session.read(truths({"handle": 4}))
    with pytest.raises(BadInput, match="rows: 7"):
        session.read(truths(*[{"handle": 1}] * 7))
    session.read(truths({"handle": 2, "forget": True}, {"handle": 5}))


def test_a_text_that_finds_no_room_is_forgotten_and_its_worker_told() -> None:
    session = Session(BOUNDS)
    whole = {"tokens": [1] * 90}
    edits = session.read(truths({"handle": 1, **whole}, {"handle": 2, **whole}, {"handle": 3, **whole}))
    assert [edit.wish is None for edit in edits] == [False, False, True]
    assert [(chain.handle, chain.standing) for chain in session.send()] == [(3, pb.STANDING_FULL)]
    session.read(truths({"handle": 2, "forget": True}))
    session.read(truths({"handle": 4, **whole}))
    assert not session.owes


def test_what_does_not_follow_is_asked_for() -> None:
    session = opened()
    assert session.read(truths({"handle": 1, "start": 5, "tokens": [6]})) == []
    (chain,) = session.send()
    assert (chain.handle, chain.at, chain.standing) == (1, 3, pb.STANDING_SEND)


def test_only_the_newest_of_each_place_is_owed() -> None:
    session = opened()
    session.take(1, Guess(3, 8, [4], branch=False))
    session.take(1, Guess(4, 9, [7, 8], branch=True))
    session.take(1, Guess(5, 9, [7, 8], branch=True))
    session.take(1, Guess(5, 7, [4, 5, 6], branch=False))
    assert [(chain.at, list(chain.tokens)) for chain in session.send()] == [(5, [4, 5, 6]), (5, [7, 8])]
    assert not session.owes
    session.take(2, Guess(0, 0, [1], branch=False))  # it is over meanwhile
    assert not session.owes


def test_who_does_not_read_is_not_owed_ever_more() -> None:
    session, handle = Session(Bounds(100, 50, handles=3, tokens=50)), 0
    while handle < 7:  # none of them finds room, and each is told
        handle += 1
        session.read(truths({"handle": handle, "tokens": [1] * 90}))
    with pytest.raises(BadInput, match="faster"):
        session.read(truths({"handle": handle + 1}))


def test_what_is_owed_comes_in_messages_of_a_bounded_size() -> None:
    session = Session(Bounds(context_tokens=100_000, vocab_size=200_000, handles=64, tokens=1 << 20))
    for handle in range(1, 65):
        session.read(truths({"handle": handle, "tokens": [1]}))
        for at in range(1, LONGEST_CHAIN + 2):
            for first in range(WIDEST_FAN - 1):
                tokens = [first, *[199_999] * (LONGEST_CHAIN - 1)]
                session.take(handle, Guess(99_000 + at, 2**61 - 1, tokens, branch=True))
    sizes = []
    while session.owes:
        sizes.append(pb.FromDrafter(drafts=pb.Drafts(chains=session.send())).ByteSize())
    assert len(sizes) > 1
    assert max(sizes) < 64 << 10
