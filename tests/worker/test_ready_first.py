"""Ready-first: who lets another request go first while its drafts are on their way, and who does not."""

from hypothesis import given
from hypothesis import strategies as st

from worker_service.engine.ready_first import ReadyFirst

IDS = [f"r{number}" for number in range(6)]
LATE = st.dictionaries(st.sampled_from(IDS), st.booleans())
LISTED = st.permutations(IDS).flatmap(lambda ids: st.integers(0, len(ids)).map(lambda n: ids[:n]))
STEPS = st.lists(st.tuples(LISTED, st.sets(st.sampled_from(IDS)), LATE), max_size=12)


def test_the_next_that_is_ready_goes_in_the_place_of_one_whose_drafts_are_due() -> None:
    rule = ReadyFirst()
    assert rule.order(["a", "b", "c", "d"], 2, {"a", "b"}, {"a": True, "c": True}) == ["b", "d", "a", "c"]
    assert rule.ran(["b", "d"], ["a", "b", "c", "d"]) == ["a"]


def test_nobody_yields_twice_running() -> None:
    rule = ReadyFirst()
    late = {"a": True}
    assert rule.order(["a", "b"], 1, {"a"}, late)[0] == "b"
    rule.ran(["b"], ["a", "b"])
    assert rule.order(["a", "b"], 1, {"a"}, late)[0] == "a"
    rule.ran(["a"], ["a", "b"])
    assert rule.order(["a", "b"], 1, {"a"}, late)[0] == "b"


def test_whose_drafts_are_far_off_goes_on_without_them() -> None:
    assert ReadyFirst().order(["a", "b"], 1, {"a"}, {"a": False}) == ["a", "b"]


def test_one_that_steps_back_until_its_drafts_are_there_is_deferred_but_one_that_has_them_is_not() -> None:
    for late, deferred in (({"b": True}, ["b"]), ({}, [])):
        rule = ReadyFirst()
        rule.order(["a", "b"], 1, {"a"}, {"a": True})
        rule.ran(["b"], ["a", "b"])
        rule.order(["a", "b"], 1, {"a"}, late)
        assert rule.ran(["a"], ["a", "b"]) == deferred


def test_one_for_whose_substitute_there_was_no_memory_did_not_yield() -> None:
    rule = ReadyFirst()
    assert rule.order(["a", "b"], 1, {"a"}, {"a": True}) == ["b", "a"]
    assert rule.ran(["a"], ["a", "b"]) == []
    assert rule.order(["a", "b"], 1, {"a"}, {"a": True}) == ["b", "a"]


@given(STEPS, st.integers(1, 4))
def test_all_listed_are_tried_once_and_only_whoever_may_is_passed_over_for_one_that_is_ready(
    steps: list[tuple[list[str], set[str], dict[str, bool]]], slots: int
) -> None:
    rule, before = ReadyFirst(), set[str]()
    for listed, yields, late in steps:
        order = rule.order(listed, slots, yields, late)
        assert sorted(order) == sorted(listed)
        passed, instead = set(listed[:slots]) - set(order[:slots]), set(order[:slots]) - set(listed[:slots])
        assert passed <= yields - before
        assert all(late.get(id) for id in passed)
        assert not instead & late.keys()
        assert len(listed) > slots or order == listed
        assert [id for id in listed[:slots] if id not in passed] == [id for id in order[:slots] if id not in instead]
        before = passed
        rule.ran(order[:slots], listed)
