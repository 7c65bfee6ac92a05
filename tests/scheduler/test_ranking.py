"""The order of claims, against a plain sorted list."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.core import ranking
from scheduler_service.core.ranking import Ranking


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 60), max_size=150),
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 60)), max_size=30),
    st.integers(0, 70),
    st.integers(0, 10),
)
def test_it_is_a_sorted_list(steps: list[int], moves: list[tuple[int, int]], number: int, count: int) -> None:
    """Each number is added, or removed if it is there; then some move. Chunks are so short that they are split and
    emptied."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "CHUNK", 3)
        kept, keys = Ranking(), set()
        for step in steps:
            key = (step, "id")
            (kept.remove if key in keys else kept.add)(key)
            keys ^= {key}
        for place, step in moves:
            if keys and (new := (step, "id")) not in keys:
                old = sorted(keys)[place % len(keys)]
                kept.move(old, new)
                keys = keys - {old} | {new}
    plain = sorted(keys)
    assert (list(kept), list(reversed(kept)), len(kept)) == (plain, plain[::-1], len(plain))
    assert kept.first(count) == plain[:count]
    assert list(kept.beyond(count)) == plain[count:]
    assert kept.before((number, "id")) == sum(key < (number, "id") for key in plain)


def test_what_is_not_there_cannot_be_removed_or_moved() -> None:
    kept = Ranking()
    for key in ((1, "a"), (3, "c")):
        kept.add(key)
    for missing in ((0, "z"), (2, "b"), (4, "d")):
        with pytest.raises(KeyError):
            kept.remove(missing)
        with pytest.raises(KeyError):
            kept.move(missing, (5, "e"))
