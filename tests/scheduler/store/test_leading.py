"""What every store promises of leaders: one leads at a time, and those before it write nothing."""

from dataclasses import replace

import pytest

from scheduler_service.store import Fenced, LostWrites, Pulse, Store
from tests.scheduler.store.writes import created, output, submission, tokens


async def test_each_leader_has_a_higher_epoch_even_if_the_clock_went_back(store: Store) -> None:
    assert await store.lead(5000) == 5000
    assert await store.lead(4000) == 5001


async def test_an_earlier_leader_is_fenced(store: Store) -> None:
    old = await created(store, "a")
    await store.lead(2000)
    with pytest.raises(Fenced):
        await store.commit(old.epoch, 2, [tokens("a", 0, 10)])
    with pytest.raises(Fenced):
        await store.rewrite(old.epoch, 1, 1, [replace(submission("a"), start=0)])
    assert await output(store) == []


async def test_who_leads_is_seen_by_its_commits_until_it_steps_down(store: Store) -> None:
    assert await store.pulse() == Pulse(0, None)
    reign = await created(store, "a")
    assert await store.pulse() == Pulse(reign.epoch, 1)
    await reign.commit()
    assert await store.pulse() == Pulse(reign.epoch, 2)
    await store.step_down(reign.epoch - 1)  # another's business
    assert await store.pulse() == Pulse(reign.epoch, 2)
    await store.step_down(reign.epoch)
    assert await store.pulse() == Pulse(reign.epoch, None)


async def test_of_two_that_saw_the_same_pulse_one_leads(store: Store) -> None:
    for before in (await store.pulse(), Pulse(1000, 0)):
        assert await store.lead(1000, before) >= 1000
        with pytest.raises(Fenced):
            await store.lead(5000, before)


async def test_who_repeats_an_attempt_to_lead_finds_out_that_it_leads(store: Store) -> None:
    before = await store.pulse()
    epoch = await store.lead(1000, before, "one")  # and the answer is lost
    assert await store.lead(1001, before, "one") == epoch
    assert await store.pulse() == Pulse(epoch, 0)
    assert await store.commit(epoch, 1, []) == []
    assert await store.lead(1002, before, "one") == epoch  # the first call, which arrives late
    assert await store.pulse() == Pulse(epoch, 1)


async def test_an_attempt_to_lead_that_is_repeated_after_another_leads_is_fenced(store: Store) -> None:
    before = await store.pulse()
    epoch = await store.lead(1000, before, "one")
    other = await store.lead(1000, Pulse(epoch, 0), "two")
    with pytest.raises(Fenced):
        await store.lead(1001, before, "one")
    assert await store.pulse() == Pulse(other, 0)


async def test_an_earlier_leader_cannot_overwrite_what_was_learned(store: Store) -> None:
    old = await store.lead(1000)
    await store.save_learned(await store.lead(2000), b"new")
    with pytest.raises(Fenced):
        await store.save_learned(old, b"old")
    assert await store.learned() == b"new"


async def test_a_leader_whose_epoch_is_not_the_stored_one_sets_nothing_aside(store: Store) -> None:
    old = await created(store, "a")
    epoch = await store.lead(2000)
    with pytest.raises(Fenced):
        await store.set_aside(old.epoch, "a", "reason")
    with pytest.raises(LostWrites):
        await store.set_aside(epoch + 1, "a", "reason")
    assert await output(store) == []
