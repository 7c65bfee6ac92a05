"""Policies: who goes before whom, and which settings they take."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.core.beliefs import Acceptance, Length
from scheduler_service.core.entry import Entry
from scheduler_service.core.events import Submitted
from scheduler_service.core.known import Known
from scheduler_service.core.policies import Claim, Las, Policy, make_policy, policy_name
from scheduler_service.core.types import View
from tests.scheduler.builders import Seen, core, request

Drawn = tuple[int, int, int]  # of a round: new, drafted, accepted


def view(**changes: object) -> View:
    return Seen(**{"request": request("a", arrival=5.0)} | changes)  # type: ignore[arg-type]


def claim(policy: Policy, seen: View) -> Claim:
    return policy.claim(seen, round_s=1.0)


def test_fcfs_orders_by_arrival_alone() -> None:
    assert claim(make_policy("fcfs"), view(attained_s=99.0, predicted_tokens=1)) == (1, 0, 5.0)


@pytest.mark.parametrize(("attained_s", "level"), [(0, 1), (9.9, 1), (10, 2), (19.9, 2), (20, 3), (79, 4), (1e9, 6)])
def test_attained_service_demotes_through_queues_of_doubling_size(attained_s: float, level: int) -> None:
    """With q0 = 10 rounds of one second: [0, 10), [10, 20), [20, 40), [40, 80), [80, 160), the rest."""
    assert claim(make_policy("laps-sd"), view(attained_s=attained_s)).level == level


def test_sjf_orders_by_predicted_length_and_never_preempts() -> None:
    policy = make_policy("sjf")
    assert claim(policy, view(predicted_tokens=70, emitted=60)) == (1, 0, 70)
    assert not policy.preemptive


def test_srpt_orders_by_what_remains_of_the_prediction() -> None:
    assert claim(make_policy("srpt-length"), view(predicted_tokens=70, emitted=60)) == (1, 0, 10)


def test_under_srpt_who_outlives_the_prediction_is_not_nearly_finished_for_ever() -> None:
    overrun = view(predicted_tokens=500, emitted=500)
    assert claim(make_policy("srpt-length", ["length_margin=0.5"]), overrun) == (1, 0, 250)


@pytest.mark.parametrize(("attained_s", "quanta"), [(0.0, 0), (2.9, 0), (3 * 0.1 / 0.1, 1), (8.9999999999, 3)])
def test_las_counts_whole_quanta_of_service(attained_s: float, quanta: int) -> None:
    assert claim(make_policy("las", ["quantum_rounds=3"]), view(attained_s=attained_s)) == (1, 0, quanta)


@pytest.mark.parametrize(("attained_s", "level"), [(0, 1), (9.9, 1), (10, 2), (29.9, 2), (30, 3), (70, 4), (1e9, 6)])
def test_mlfq_sinks_as_quanta_of_doubling_size_are_used_up(attained_s: float, level: int) -> None:
    assert claim(make_policy("mlfq"), view(attained_s=attained_s)).level == level


def test_mlfq_skips_the_queues_whose_quantum_does_not_cover_the_prefill() -> None:
    policy = make_policy("mlfq")
    assert claim(policy, view(prefill_s=35.0)).level == 3
    assert claim(policy, view(prefill_s=35.0, attained_s=40.0)).level == 4


@pytest.mark.parametrize(("emitted", "phase"), [(0, 1), (15, 1), (16, 2), (31, 2), (32, 3), (64, 4), (10**9, 16)])
def test_gsa_counts_phases_of_doubling_output(emitted: int, phase: int) -> None:
    assert claim(make_policy("gsa"), view(emitted=emitted)).level == phase


def test_a_perceptible_request_is_ordered_by_the_papers_estimate() -> None:
    """L = 100, n = 4, A = 0.25: 100 / (4 * 0.25 + 1) = 50 rounds of a second."""
    seen = view(perceptible=True, acceptance=Acceptance(20, 80, 20))
    assert claim(make_policy("laps-sd"), seen) == (4, 0, 50.0)


def test_a_round_that_proposed_fewer_drafts_than_it_might_is_no_faster_for_that() -> None:
    """A drafter that finds nothing in 9 of 10 rounds and is always right in the tenth."""
    seen = view(perceptible=True, acceptance=Acceptance(rounds=20, drafted=2, accepted=2))
    assert claim(make_policy("laps-sd"), seen).key == pytest.approx(100 / 1.1)


def test_within_a_queue_the_perceptible_go_first() -> None:
    policy = make_policy("laps-sd")
    blind = view(attained_s=45.0, request=request("early", arrival=0.0))
    perceptible = view(perceptible=True, acceptance=Acceptance(20, 80, 20))
    assert claim(policy, perceptible) < claim(policy, blind)


def test_the_key_remaining_subtracts_what_was_served() -> None:
    seen = view(perceptible=True, acceptance=Acceptance(20, 80, 20), attained_s=30.0)
    assert claim(make_policy("laps-sd", ["key=remaining"]), seen).key == 20.0


def test_the_destination_stay_keeps_the_queue_of_attained_service() -> None:
    seen = view(perceptible=True, acceptance=Acceptance(20, 80, 20), attained_s=3.0)
    assert claim(make_policy("laps-sd", ["destination=stay"]), seen) == (1, 0, 50.0)


def test_the_destination_remaining_lets_it_rise_as_it_is_served() -> None:
    seen = view(perceptible=True, acceptance=Acceptance(20, 80, 20), attained_s=45.0)
    assert claim(make_policy("laps-sd", ["destination=remaining"]), seen) == (1, 0, 50.0)


def test_an_overrun_prediction_still_looks_unfinished() -> None:
    seen = view(perceptible=True, acceptance=Acceptance(20, 80, 0), emitted=200, predicted_tokens=200, attained_s=200.0)
    assert claim(make_policy("laps-sd", ["key=remaining"]), seen).key > 0


def test_it_becomes_perceptible_after_a_window_of_steady_rounds() -> None:
    policy = make_policy("laps-sd", ["window=3", "epsilon=0.1"])
    assert not policy.perceives(view(acceptance=Acceptance(means=(0.5, 0.5))))
    assert policy.perceives(view(acceptance=Acceptance(means=(0.5, 0.55, 0.5))))
    assert not policy.perceives(view(acceptance=Acceptance(means=(0.7, 0.55, 0.5))))


ADAPTED = ("reading=adapted", "expected_rounds=1", "doubt=0.25", "first_queue_rounds=10")


@pytest.mark.parametrize(
    ("predicted", "rounds", "perceptible"),
    [(9, 0, True), (90, 0, False), (90, 1, False), (90, 4, True)],  # of 0.5 / sqrt(rounds + 1), 0.25 is left after 3
)
def test_the_adapted_reading_waits_for_acceptance_as_long_as_it_matters(
    predicted: int, rounds: int, perceptible: bool
) -> None:
    seen = view(predicted_tokens=predicted, acceptance=Acceptance(rounds, 4 * rounds, 2 * rounds))
    assert make_policy("laps-sd", ADAPTED).perceives(seen) is perceptible
    assert make_policy("laps-sd", [*ADAPTED, "doubt=1"]).perceives(seen)


def test_the_adapted_reading_orders_by_what_remains() -> None:
    """60 tokens at three a round, and the way back."""
    policy = make_policy("laps-sd", ADAPTED)
    seen = view(perceptible=True, emitted=40, acceptance=Acceptance(20, 80, 40), prior_accepted=2.0, resume_s=3.0)
    assert policy.claim(seen, 1.0) == Claim(3, 0, pytest.approx(23.0))
    assert policy.claim(replace(seen, perceptible=False, attained_s=5.0), 1.0) == Claim(1, 1, seen.request.arrival)


def test_a_request_may_be_perceptible_when_it_comes() -> None:
    one = core("laps-sd", *ADAPTED)
    for id, tokens in (("short", 9), ("long", 900)):
        one.observe(Submitted(request(id, predicted_tokens=tokens)), 0.0)
    assert [entry.perceptible for entry in one.fleet.entries.values()] == [True, False]


@pytest.mark.parametrize("name", ["gittins", "laps-sd", "laps-sd:reading=adapted"])
def test_who_is_blind_takes_every_acceptance_for_the_usual_one(name: str) -> None:
    name, *settings = name.split(":")
    policy = make_policy(name, [*settings, "blind=true"])
    poor, rich = (view(perceptible=True, acceptance=Acceptance(20, 80, seen), emitted=40) for seen in (10, 70))
    assert policy.claim(poor, 1.0) == policy.claim(rich, 1.0)


@pytest.mark.parametrize(
    ("name", "setting", "complaint"),
    [
        ("nonesuch", "", "unknown policy 'nonesuch'; known: fcfs, sjf, srpt-length"),
        ("laps-sd:reading=adapted", "", "has a setting in it: give the policy laps-sd, and policy-set reading=adapted"),
        ("srpt-length", "length_margin=-1", "length_margin must be from 0 to 10"),
        ("las", "quantum_rounds=0", "quantum_rounds must be at least 1"),
        ("mlfq", "queues=17", "queues must be from 1 to 16"),
        ("mlfq", "first_quantum_rounds=0", "first_quantum_rounds must be at least 1"),
        ("gsa", "phases=0", "phases must be from 1 to 16"),
        ("gsa", "phases=17", "phases must be from 1 to 16"),
        ("gsa", "first_phase_tokens=0", "first_phase_tokens must be at least 1"),
        ("laps-sd", "speed=1", "'speed=1' is not name=value with a setting of laps-sd"),
        ("laps-sd", "queues", "'queues' is not name=value"),
        ("laps-sd", "queues=many", "'queues=many' is no int"),
        ("laps-sd", "queues=0", "queues must be from 1 to 16"),
        ("laps-sd", "epsilon=nan", "epsilon must be from 0 to 1"),
        ("laps-sd", "window=33", "window must be from 1 to 32"),
        ("laps-sd", "first-queue-rounds=-1", "first_queue_rounds must be at least 0"),
        ("laps-sd", "length_margin=-1", "length_margin must be from 0 to 10"),
        ("laps-sd", "key=shortest", "key must be total or remaining"),
        ("laps-sd", "reading=mine", "reading must be paper or adapted"),
        ("laps-sd", "doubt=2", "doubt must be from 0 to 1"),
        ("laps-sd", "expected_rounds=-1", "expected_rounds must be from 0"),
        ("laps-sd", "destination=top", "destination must be estimate, remaining or stay"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(name: str, setting: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint.replace("(", r"\(")):
        make_policy(name, [setting] if setting else [])


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("examples.own_policy.ShortPrompts", ["patience_s=30"], ""),
        ("examples.own_policy.ShortPrompts", ["patience=30"], "known: patience_s"),
        ("examples.own_policy.View", [], "is no dataclass derived from"),
        ("examples.own_policy.Nothing", [], "cannot be imported"),
        ("nosuch.module.Policy", [], "is its folder in PYTHONPATH"),
        ("tests.scheduler.own_policies.NoDefault", [], "its setting patience_s needs a default"),
        ("tests.scheduler.own_policies.Halves", ["known=a"], "is no number, text or bool, and cannot be set so"),
        ("tests.scheduler.own_policies.Refuses", [], "cannot be made: ZeroDivisionError"),
        ("tests.scheduler.broken_policy.Policy", [], "cannot be imported: ZeroDivisionError"),
    ],
)
def test_a_policy_may_be_a_class_from_elsewhere(name: str, settings: list[str], said: str) -> None:
    if said:
        with pytest.raises(ValueError, match=said):
            make_policy(name, settings)
    else:
        policy = make_policy(name, settings)
        assert policy_name(policy) == name
        assert claim(policy, view(request=request("a", 5.0, prompt=10_000))) == (1, 0, 35.0)


ROUND = st.integers(0, 4).flatmap(lambda drafted: st.integers(0, drafted).map(lambda n: (n + 1, drafted, n)))
TELLING = ["srpt-length", "las:quantum-rounds=3", "mlfq", "gsa", "gittins", "gittins:blind=true:ageing=0.5", "laps-sd"]
TELLING += ["laps-sd:key=remaining:destination=remaining", "laps-sd:destination=stay", "laps-sd:reading=adapted"]


@settings(deadline=None)
@given(
    st.sampled_from(TELLING),
    st.lists(ROUND, min_size=1, max_size=40),
    st.lists(ROUND, min_size=1, max_size=40),
    st.builds(Length, st.floats(1.0, 7.0), st.floats(0.1, 2.0)),
    st.integers(1, 300),
    st.booleans(),
)
def test_no_claim_of_the_next_rounds_goes_behind_the_worst_that_was_told(
    text: str, before: list[Drawn], after: list[Drawn], length: Length, hint: int, perceptible: bool
) -> None:
    name, *own = text.split(":")
    policy = make_policy(name, own)
    entry = Entry(request("a", arrival=5.0, max_tokens=500, predicted_tokens=hint), Known(4))
    entry.prefill_owed, entry.perceptible = 0, perceptible or (policy.perceptive and "adapted" in text)
    entry.expect(length)

    def run(rounds: list[Drawn]) -> Iterator[Claim]:
        for new, drafted, accepted in rounds:
            entry.emitted += new
            entry.acceptance = entry.acceptance.after(drafted, accepted, new)
            entry.remaining_tokens = entry.forecast.remaining(entry.emitted)
            entry.perceptible |= policy.perceptive and policy.perceives(entry)
            yield policy.claim(entry, entry.known.round_s)

    list(run(before))
    worst = policy.worst(entry, entry.known.round_s, len(after), 5 * len(after))
    assert worst is not None
    assert all(claim <= worst for claim in run(after))


def test_a_policy_that_claims_otherwise_than_the_one_it_is_derived_from_tells_no_worst_claim() -> None:
    class Reversed(Las):
        def claim(self, view: View, round_s: float) -> Claim:
            return Claim(1, 0, -view.attained_s)

    assert Las().worst(view(), 1.0, 3, 15) == (1, 0, 3.0)
    assert Reversed().worst(view(), 1.0, 3, 15) is None
