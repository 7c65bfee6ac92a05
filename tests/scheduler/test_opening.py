"""The index in two stages: a first token is worth something, too."""

import math
from dataclasses import replace
from random import Random

import pytest

from scheduler_service.core.beliefs import Length
from scheduler_service.core.events import Draining, Submitted
from scheduler_service.core.policies import make_policy
from scheduler_service.core.policies.opening import opening_tokens
from tests.scheduler.builders import core, request, worker_up
from tests.scheduler.test_policies import view
from tests.simulator.builders import ends, job, run


def key(opening: str, **seen: object) -> float:
    return make_policy("gittins", [f"opening={opening}"]).claim(replace(view(), **seen), round_s=1.0).key  # type: ignore[arg-type]


def least_work_per_pay(worth: float, spread: float, before: float, first: float) -> float:
    """By drawing outputs of median 1: over many times to stop, from the first round's end on."""
    rng = Random(1)
    drawn = sorted(rng.lognormvariate(0, spread) for _ in range(50_000))
    best, work = math.inf, 0.0
    for done, size in enumerate(drawn, 1):
        work += size
        if size >= first:
            mean = (work + (len(drawn) - done) * size) / len(drawn)
            best = min(best, (before + mean) / (worth + done / len(drawn)))
    return min(best, (before + first) / (worth + sum(size <= first for size in drawn) / len(drawn)))


@pytest.mark.parametrize("worth", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("spread", [0.3, 1.0])
@pytest.mark.parametrize("before", [0.0, 0.4, 3.0])
def test_it_is_the_best_rate_of_pay_over_all_times_to_stop(worth: float, spread: float, before: float) -> None:
    found = opening_tokens(Length(0.0, spread), 100.0, before, 0.05, worth)
    assert found == pytest.approx(least_work_per_pay(worth, spread, before, 0.05), rel=0.06)


def test_a_bound_on_the_output_cuts_it() -> None:
    """Ten tokens after a prefill worth ten more, for a pay of 1.5."""
    assert opening_tokens(Length(math.log(1000), 0.3), 10.0, 10.0, 3.0, 0.5) == pytest.approx(20 / 1.5)


def test_a_first_token_that_is_worth_nothing_changes_nothing() -> None:
    assert key("mean") == key("0") == make_policy("gittins").claim(view(), round_s=1.0).key


def test_the_more_a_first_token_is_worth_the_earlier_a_request_is_opened() -> None:
    long = Length(7.0, 0.5)
    keys = [key(opening, length=long) for opening in ("1", "first-token", "balanced", "mean")]
    assert keys == sorted(keys)
    assert keys[0] < keys[2] < keys[3]


def test_after_the_first_token_the_order_is_what_it_was() -> None:
    assert key("first-token", emitted=1) == key("mean", emitted=1)


def test_a_long_prompt_makes_a_first_token_dear() -> None:
    assert key("balanced", length=Length(7.0, 0.5)) < key("balanced", length=Length(7.0, 0.5), resume_s=5.0)


def test_a_newcomer_is_opened_before_a_running_request_goes_on() -> None:
    """The first runs since 0 and needs 30 more rounds; the second would take 60."""
    jobs = [job("first", tokens=40, predicted_output_tokens=40), job("new", 10.0, 60, predicted_output_tokens=60)]
    waits, opened = (
        {one.job.id: one.first_token_s - one.job.arrival_s for one in run(jobs, f"gittins:opening={name}").outcomes}
        for name in ("mean", "first-token")
    )
    assert (waits["new"], opened["new"]) == (31, 1)
    assert ends(run(jobs, "gittins:opening=first-token"))["first"] == 41


def test_in_a_crowd_a_first_token_is_worth_nothing() -> None:
    """Who is opened there holds KV, and then stands still for long."""
    assert key("first-token", live_per_slot=17.0) == key("mean", live_per_slot=17.0)
    assert key("first-token", live_per_slot=15.0) < key("mean", live_per_slot=15.0)
    one = core("gittins")
    one.observe(worker_up(slots=2), 0.0)
    for id in "abc":
        one.observe(Submitted(request(id)), 0.0)
    assert [entry.live_per_slot for entry in one.fleet.entries.values()] == [0, 0.5, 1]


def test_where_memory_is_short_a_first_token_is_worth_nothing() -> None:
    """The worker has ten blocks. One request may leave half of them free beside a newcomer, two may not."""
    one = core("gittins", "opening=first-token")
    one.observe(worker_up(slots=2, blocks=10), 0.0)
    for number, (id, free) in enumerate((("a", 10), ("b", 6), ("c", 5))):
        one.fleet.workers["w"].free_blocks = free
        one.observe(Submitted(request(id, max_tokens=20)), float(number))
    assert [entry.memory_short for entry in one.fleet.entries.values()] == [False, False, True]
    assert key("first-token", memory_short=True) == key("mean", memory_short=True)


def test_the_memory_of_a_worker_that_drains_is_no_room_for_a_newcomer() -> None:
    queue = core("gittins")
    queue.observe(worker_up("ends", slots=8, blocks=1000), 0.0)
    queue.observe(worker_up("full", slots=1, blocks=2), 0.0)
    queue.observe(Draining("ends"), 0.0)
    queue.observe(Submitted(request("a", prompt=20)), 0.0)
    assert queue.fleet.entries["a"].memory_short


@pytest.mark.parametrize("opening", ["-1", "soon", "nan", "1001"])
def test_a_wrong_opening_is_refused(opening: str) -> None:
    with pytest.raises(ValueError, match="opening must be mean, balanced, first-token, or a number"):
        make_policy("gittins", [f"opening={opening}"])
