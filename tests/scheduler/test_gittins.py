"""The index over beliefs, and what finished requests teach."""

import math
from dataclasses import replace
from random import Random

import pytest

from scheduler_service.core.beliefs import Acceptance, Expected, FleetLength, Length, Trust
from scheduler_service.core.events import Submitted
from scheduler_service.core.policies import make_policy
from scheduler_service.core.policies.gittins import rank
from scheduler_service.core.refit import AT_ONCE
from scheduler_service.core.types import View
from tests.scheduler.builders import FakeWorker, core, request
from tests.scheduler.test_policies import view


def key(seen: View, *settings: str) -> float:
    return make_policy("gittins", settings).claim(seen, round_s=1.0).key


def simulated_rank(age: float, spread: float, most: float = math.inf) -> float:
    """Least mean work per completion over many stops, by drawing sizes, none above `most`."""
    rng = Random(1)
    drawn = (min(rng.lognormvariate(0, spread), most) for _ in range(200_000))
    left = sorted(size - age for size in drawn if size > age)
    best, work = math.inf, 0.0
    for done, size in enumerate(left, 1):
        work += size
        if done > len(left) // 200:
            best = min(best, (work + (len(left) - done) * size) / done)
    return best


@pytest.mark.parametrize(("age", "spread"), [(0.0, 0.5), (0.5, 0.5), (2.0, 0.5), (0.0, 1.0), (1.0, 1.0), (4.0, 1.0)])
def test_the_table_is_the_gittins_index_of_a_log_normal(age: float, spread: float) -> None:
    assert rank(age, spread) == pytest.approx(simulated_rank(age, spread), rel=0.06)


@pytest.mark.parametrize(("emitted", "most"), [(0, 50), (0, 100), (50, 100), (90, 120), (90, 1000)])
def test_a_bound_cuts_the_length_that_the_index_is_of(emitted: int, most: int) -> None:
    """In medians of 100 tokens."""
    seen = view(request=request("a", max_tokens=most), emitted=emitted, length=Length(math.log(100), 0.8))
    expected = 100 * simulated_rank(emitted / 100, 0.8, most / 100)
    assert key(replace(seen, prior_accepted=0.0)) == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize(("policy", "spread"), [("gittins", 0.2), ("gittins:least_spread=1.0", 1.0), ("fcfs", 0.05)])
def test_no_belief_is_surer_than_the_policy_takes_for_true(policy: str, spread: float) -> None:
    """A hint that was sure and wrong must not put whoever outlives it before all others."""
    name, *settings = policy.split(":")
    one = core(name, *settings)
    one.observe(Submitted(request("sure", expected=Expected(Length(4.0, 0.05), 0.6))), 0.0)
    assert one.fleet.entries["sure"].length == Length(4.0, spread)


def test_a_sure_length_ranks_by_what_remains() -> None:
    assert rank(0.5, 0.05) == pytest.approx(0.5, rel=0.1)


def test_who_outlives_every_belief_ranks_lower_and_lower() -> None:
    assert rank(1e3, 1.0) < rank(1e4, 1.0) < rank(1e6, 1.0) < math.inf


def test_a_short_belief_goes_before_a_long_one() -> None:
    assert key(view(length=Length(4.0, 0.5))) < key(view(length=Length(5.0, 0.5)))


def test_acceptance_is_the_fleets_until_the_request_shows_its_own() -> None:
    poor, rich = (view(prior_accepted=2.0, acceptance=Acceptance(rounds)) for rounds in (1, 100))
    blank = view(prior_accepted=2.0)
    assert key(blank) < key(poor) < key(rich)
    assert key(poor) == pytest.approx(key(blank), rel=0.1)


def test_the_way_back_into_the_batch_is_charged() -> None:
    assert key(view(resume_s=3.0)) == pytest.approx(key(view()) + 3.0)


def test_good_predictions_become_trusted() -> None:
    rng, trust = Random(2), Trust()
    for _ in range(500):
        true = max(1, round(rng.lognormvariate(5, 1)))
        trust.observe(max(1, round(true * rng.lognormvariate(0, 0.2))), true)
    belief = trust.belief(300)
    assert belief.location == pytest.approx(math.log(300), abs=0.1)
    assert belief.spread == pytest.approx(0.2, abs=0.06)


def test_biased_predictions_are_put_right() -> None:
    trust = Trust()
    for true in range(20, 400):
        trust.observe(3 * true, true)
    assert math.exp(trust.belief(600).location) == pytest.approx(200, rel=0.05)


def test_useless_predictions_are_believed_no_longer() -> None:
    rng, trust = Random(2), Trust()
    for _ in range(500):
        trust.observe(max(1, round(rng.lognormvariate(5, 1))), max(1, round(rng.lognormvariate(5, 1))))
    short, long = trust.belief(20), trust.belief(1000)
    assert long.location - short.location < 0.6
    assert short.spread == pytest.approx(1.0, abs=0.1)


def test_before_anything_finished_a_hint_is_taken_at_its_word() -> None:
    assert FleetLength().belief(250) == Length(pytest.approx(math.log(250)), pytest.approx(0.7))  # type: ignore[arg-type]


@pytest.mark.parametrize("hint", [None, 150])
def test_answers_that_bounds_have_cut_are_believed_to_have_been_longer(hint: int | None) -> None:
    """Two thirds of them at 16 or 64 tokens, where the median is 150."""
    rng, fleet = Random(2), FleetLength()
    for _ in range(3000):
        tokens, most = max(1, round(rng.lognormvariate(5, 0.8))), rng.choice((16, 64, 2000))
        fleet.observe(min(tokens, most), hint, cut=tokens > most)
    assert fleet.belief(hint).location == pytest.approx(5, abs=0.15)
    assert fleet.belief(hint).spread == pytest.approx(0.8, abs=0.15)


def test_hints_are_worth_what_they_say_where_bounds_are_below_them() -> None:
    """Right but for a spread of 0.3; two thirds of the answers are cut long before."""
    rng, fleet = Random(2), FleetLength()
    for _ in range(3000):
        hint, most = rng.choice((50, 200, 800)), rng.choice((16, 32, 4000))
        tokens = max(1, round(hint * rng.lognormvariate(0, 0.3)))
        fleet.observe(min(tokens, most), hint, cut=tokens > most)
    for hint in (50, 800):
        assert fleet.belief(hint).location == pytest.approx(math.log(hint), abs=0.2)
        assert fleet.belief(hint).spread == pytest.approx(0.3, abs=0.1)


def test_without_hints_the_lengths_of_finished_requests_are_believed() -> None:
    rng, fleet = Random(2), FleetLength()
    before = fleet.belief(None)
    for _ in range(500):
        fleet.observe(max(1, round(rng.lognormvariate(3, 0.8))))
    assert math.exp(before.location) == pytest.approx(256)
    assert fleet.belief(None).location == pytest.approx(3, abs=0.15)
    assert fleet.belief(None).spread == pytest.approx(0.8, abs=0.1)


def test_what_was_learned_reaches_those_who_wait_a_few_per_plan() -> None:
    worker = FakeWorker(core("gittins"), {f"r{i}": 3 for i in range(100)})
    worker.submit(*worker.lengths, predicted_tokens=500)
    before = {id: entry.length for id, entry in worker.core.fleet.entries.items()}
    counts = []
    for _ in range(30):
        worker.step(emit=5)
        changed = [id for id, entry in worker.core.fleet.entries.items() if entry.length != before[id]]
        counts.append(len(changed) - sum(counts))
        if len(changed) == len(worker.core.fleet.entries):
            break
    assert max(counts) <= AT_ONCE
    assert sum(counts) == len(worker.core.fleet.entries)


def test_what_a_predictor_told_of_those_who_wait_stays_as_it_is() -> None:
    worker = FakeWorker(core("gittins"), dict.fromkeys("abcdefgh", 4))
    worker.submit(*worker.lengths)
    told = Expected(Length(9.0, 0.5), 0.6)
    worker.core.observe(Submitted(request("told", expected=told)), worker.now)
    key = worker.core.fleet.entries["told"].key
    worker.run(32)
    assert worker.core.fleet.known.length.finished == 8
    assert worker.core.fleet.entries["told"].length == told.length
    assert worker.core.fleet.entries["told"].key == key


def test_a_newcomer_starts_with_what_was_learned() -> None:
    worker = FakeWorker(core("gittins"), dict.fromkeys("abcdefgh", 4))
    worker.submit(*worker.lengths, predicted_tokens=500)
    worker.run(40)
    worker.core.observe(Submitted(request("new", predicted_tokens=500)), worker.now)
    assert worker.core.fleet.entries["new"].length.location < math.log(400)


@pytest.mark.parametrize("setting", ["acceptance_rounds=0", "least_spread=9"])
def test_a_wrong_setting_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=setting.partition("=")[0]):
        make_policy("gittins", [setting])
