"""What every store promises when it lost writes: a leader that has them writes them anew."""

from dataclasses import replace

import pytest

from scheduler_service.store import Fenced, LostWrites, Store, Verdict
from tests.scheduler.store.writes import Reign, created, live_ids, output, submission, tokens


async def test_what_was_lost_is_rewritten_whole_and_commits_go_on(store: Store) -> None:
    """The store went back to when "a" had one token, "b" had not ended, and "c" and the leader were not there."""
    ours = Reign(store, 5000, number=7)
    before = await created(store, "a", "b")
    await before.commit(tokens("a", 0, 10, level=3))
    with pytest.raises(LostWrites):
        await ours.commit()
    whole = [
        replace(tokens("a", 0, 10, 11, 12, level=2), submit=b"payload a"),
        replace(tokens("b", 0, 20), submit=b"payload b", ending=b"over"),
        submission("c"),
    ]
    last = ours.number - 1
    await store.rewrite(ours.epoch, -2, last, whole[:2])
    with pytest.raises(LostWrites):
        await ours.again()  # that was not all yet
    await store.rewrite(ours.epoch, last, -2, whole[2:])
    assert await ours.again(tokens("a", 3, 13, level=2)) == [Verdict.APPLIED]
    assert [await output(store, id) for id in "abc"] == [[10, 11, 12, 13], [20], []]
    assert await live_ids(store) == ["c", "a"]
    with pytest.raises(Fenced):
        await before.commit()


async def test_nothing_is_rewritten_over_what_a_leader_has_not_read(store: Store) -> None:
    """It took over on a primary that was one no more, and read there; the leader before went on here."""
    reign = await created(store, "a")
    read = await store.pulse()
    await reign.commit(tokens("a", 0, 10))
    whole = [replace(submission("a"), start=0)]
    with pytest.raises(Fenced):
        await store.rewrite(5000, 0, 0, whole, read)
    assert await output(store) == [10]
    await reign.commit(tokens("a", 1, 11))  # it still leads
    await store.rewrite(5000, 0, 0, whole, await store.pulse())
    assert await output(store) == []


async def test_what_a_leader_wrote_that_has_stepped_down_was_read_or_not(store: Store) -> None:
    reign = await created(store, "a")
    before = await store.pulse()
    await store.step_down(reign.epoch)
    with pytest.raises(Fenced):
        await store.rewrite(5000, 0, 0, [], before)  # it may have written more first
    await store.rewrite(5000, 0, 0, [], await store.pulse())


async def test_a_late_rewriting_undoes_no_commit_that_came_after_it(store: Store) -> None:
    """(Simulated faults, seed 601306.)"""
    reign = await created(store, "a")
    whole = [replace(submission("a"), start=0)]
    await store.rewrite(reign.epoch, 1, 1, whole)
    await store.rewrite(reign.epoch, 1, 1, whole)  # its answer was lost
    await reign.commit(tokens("a", 0, 10))
    with pytest.raises(LostWrites):
        await store.rewrite(reign.epoch, 1, 1, whole)
    assert await output(store) == [10]


async def test_a_late_last_part_of_a_rewriting_does_not_end_another(store: Store) -> None:
    """The store was lost once more before it came. (Simulated faults, seed 646214.)"""
    reign = await created(store, "a", "b")
    await store.rewrite(reign.epoch, -2, 1, [replace(submission("a"), start=0)])
    await store.rewrite(reign.epoch, -3, 1, [replace(submission("a"), start=0)])
    with pytest.raises(LostWrites):
        await store.rewrite(reign.epoch, 1, -2, [])
    with pytest.raises(LostWrites):
        await reign.commit()
