"""Drafts that are made elsewhere: who gets them, how long they are, what late ones mean, who lets others go first."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core.beliefs import Acceptance
from scheduler_service.core.core import Core
from scheduler_service.core.costs import CostProfile
from scheduler_service.core.draft import INERTIA, draft_lengths, expected_tokens
from scheduler_service.core.events import CostChanged, Round, StepDone, Submitted, WorkerUp
from scheduler_service.core.lifecycle import State
from scheduler_service.core.policies import make_policy
from scheduler_service.core.terms import EVERYBODY_ELSE, Terms
from scheduler_service.core.types import Finish, Plan
from tests.scheduler.builders import Seen, request

COST = CostProfile(draft_s=0.01, verify_s=0.1, verify_slope_s=0.0, prefill_token_s=0.0)
REMOTE = replace(COST, supply_s=0.02, delay_s=0.01, chains=8)
costs = st.builds(
    CostProfile,
    draft_s=st.floats(0, 1),
    verify_s=st.floats(0.01, 1),
    verify_slope_s=st.floats(0, 1),
    verify_token_s=st.floats(0, 1),
    supply_s=st.floats(0, 1),
    hit=st.floats(0, 1),
    chains=st.just(4),
    fallback=st.floats(0, 3),
    wait_s=st.floats(0, 1),
)


def core_of(cost: CostProfile, requests: int, slots: int = 2, policy: str = "fcfs", **options: object) -> Core:
    """With one worker, and requests that have come one after the other."""
    core = Core(make_policy(policy), **options)  # type: ignore[arg-type]
    core.observe(WorkerUp("w", slots, 1000, 16, 8, cost, ()), 0.0)
    for number in range(requests):
        core.observe(Submitted(request(f"r{number}", float(number))), 0.0)
    return core


def row(core: Core, id: str, drafted: int = 4, accepted: int = 2, **more: object) -> Round:
    entry = core.fleet.entries[id]
    prefilled = entry.prefill_owed
    return Round(id, entry.placement, entry.emitted, accepted + 1, drafted, accepted, prefilled, 0, 1, **more)  # type: ignore[arg-type]


def report(core: Core, *rows: Round) -> Plan:
    core.observe(StepDone("w", rows, 1000, 0.1), 1.0)
    return core.plan("w")


def deferred(core: Core, id: str) -> Round:
    return replace(row(core, id, 0, -1), prefilled=0, skipped=True, deferred=True)


# ---- lengths ----


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=3), costs)
def test_no_other_lengths_promise_markedly_more(batch: list[tuple[float, bool]], cost: CostProfile) -> None:
    """By the formula: hit * E(k) + (1 - hit) * E_fallback tokens, for a pass, its drafts and the wait."""

    def rate(lengths: tuple[int, ...]) -> float:
        tokens = 0.0
        for (chance, there), length in zip(batch, lengths, strict=True):
            here = expected_tokens(chance, length)
            tokens += cost.hit * here + (1 - cost.hit) * (1 + cost.fallback) if there and length else here
        return tokens / cost.step_s(lengths, elsewhere)

    chances, elsewhere = [chance for chance, _ in batch], [there for _, there in batch]
    if cost.fallback and cost.hit < 1:  # a lookup is there or not, whoever else drafts: it is no reason to draft
        cost = replace(cost, fallback=0.0)
    chosen = tuple(draft_lengths(chances, [0] * len(batch), cost, 4, elsewhere))
    most = min(4, max(1, cost.supplied))
    choices = [range((most if there else 4) + 1) for there in elsewhere]
    best = max(map(rate, product(*choices)))
    assert best <= (1 + INERTIA) * rate(chosen) * (1 + 1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), costs)
def test_nobody_is_to_have_more_than_a_pass_can_be_supplied_with(chances: list[float], cost: CostProfile) -> None:
    lengths = draft_lengths(chances, [0] * len(chances), cost, 16, [True] * len(chances))
    assert max(lengths) <= max(1, cost.verify_s / max(cost.supply_s, 1e-9))


def test_hidden_drafting_asks_for_longer_drafts_and_rare_hits_with_a_wait_for_none() -> None:
    dear = replace(REMOTE, draft_s=0.05, supply_s=0.005)
    assert draft_lengths([0.7], [0], dear, 8, [True])[0] > draft_lengths([0.7], [0], dear, 8)[0]
    assert draft_lengths([0.7], [0], replace(dear, hit=0.05, wait_s=0.04), 8, [True]) == [0]


# ---- who gets them ----


def test_those_that_run_next_come_first_and_no_more_than_there_are_chains() -> None:
    core = core_of(replace(REMOTE, chains=3), requests=6)
    runs = core.plan("w").schedule
    assert [run.id for run in runs if not run.here] == ["r0", "r1", "r2"]


def test_of_those_that_run_next_whoever_gains_most_comes_first() -> None:
    core = core_of(replace(REMOTE, chains=1), requests=2)
    for _ in range(6):
        runs = report(core, row(core, "r0", 4, 0), row(core, "r1", 4, 4)).schedule
    assert {run.id: run.here for run in runs} == {"r0": True, "r1": False}


def test_a_long_text_that_is_soon_over_is_not_sent_elsewhere() -> None:
    cost = replace(REMOTE, prefill_token_s=0.001)
    core = Core(make_policy("fcfs"))
    core.observe(WorkerUp("w", 2, 10_000, 16, 8, cost, ()), 0.0)
    core.observe(Submitted(request("soon", prompt=30_000, max_tokens=2)), 0.0)
    core.observe(Submitted(request("long", 1.0, prompt=30_000, max_tokens=4000, predicted_tokens=4000)), 0.0)
    assert {run.id: run.here for run in core.plan("w").schedule} == {"soon": True, "long": False}


def test_no_chain_is_kept_for_a_tenant_that_forbids_it_also_from_now_on() -> None:
    core = core_of(replace(REMOTE, chains=1), requests=1)
    core.observe(Submitted(request("open", 1.0, tenant="open")), 0.0)
    assert {run.id: run.here for run in core.plan("w").schedule} == {"r0": False, "open": True}
    core.fleet.tenants.terms = {EVERYBODY_ELSE: Terms(local_drafts=True), "open": Terms()}
    runs = report(core, row(core, "r0"), row(core, "open")).schedule
    assert {run.id: run.here for run in runs} == {"r0": True, "open": False}


def test_workers_without_such_a_drafter_are_told_nothing_of_it() -> None:
    core = core_of(COST, requests=3, ready_first=True)
    assert not any(run.here or run.yields for run in core.plan("w").schedule)


def test_a_drafter_that_goes_takes_nothing_with_it_and_ended_requests_stay_ended() -> None:
    core = core_of(REMOTE, requests=3, slots=3, policy="laps-sd")
    core.plan("w")
    report(core, row(core, "r0", finish=Finish.STOP), row(core, "r1"), row(core, "r2"))
    core.observe(CostChanged("w", COST), 2.0)
    runs = core.plan("w").schedule
    assert sorted(run.id for run in runs) == ["r1", "r2"]
    assert not any(run.here or run.yields for run in runs)
    assert all(not entry.elsewhere and not entry.hidden_s for entry in core.fleet.entries.values())


# ---- what it is worth ----


@pytest.mark.parametrize("policy", ["laps-sd", "laps-sd:reading=adapted:doubt=1", "gittins"])
def test_an_estimate_counts_only_the_drafting_that_is_not_hidden(policy: str) -> None:
    name, *settings = policy.split(":")
    view = Seen(request("a"), perceptible=True, acceptance=Acceptance(10, 40, 20), emitted=30)
    claims = [make_policy(name, settings).claim(replace(view, hidden_s=s), 0.14).key for s in (0.04, 0.0, -0.04)]
    assert claims[0] < claims[1] < claims[2]


def test_a_wait_that_is_longer_than_drafting_here_makes_an_estimate_longer() -> None:
    core = core_of(replace(REMOTE, wait_s=0.05), requests=1, policy="laps-sd")
    core.plan("w")
    assert core.fleet.entries["r0"].hidden_s == pytest.approx(4 * 0.01 - 0.05)


# ---- late drafts ----


@pytest.mark.parametrize(("cost", "samples"), [(REMOTE, 1), (COST, 4)])
def test_drafts_that_did_not_come_are_no_sample_and_a_drafter_here_that_finds_none_is(
    cost: CostProfile, samples: int
) -> None:
    core = core_of(cost, requests=1, policy="laps-sd")
    core.plan("w")
    report(core, row(core, "r0", 0, 0))  # its prompt
    report(core, row(core, "r0", 4, 2))
    for _ in range(3):
        report(core, row(core, "r0", 0, 0))
    acceptance = core.fleet.entries["r0"].acceptance
    assert (len(acceptance.means), acceptance.rounds) == (samples, 4)


# ---- ready-first ----


def test_who_may_be_passed_over_is_said_only_where_that_is_wanted() -> None:
    for wanted in (False, True):
        core = core_of(REMOTE, requests=4, ready_first=wanted)
        assert {run.yields for run in core.plan("w").schedule} == {wanted}


def test_with_ready_first_as_many_are_listed_again_as_run() -> None:
    counts = []
    for wanted in (False, True):
        core = core_of(replace(REMOTE, chains=100), requests=100, slots=32, ready_first=wanted)
        counts.append(len(core.plan("w").schedule))
    assert counts == [40, 64]


def test_a_request_that_waits_for_its_drafts_is_not_preempted_and_learns_nothing() -> None:
    core = core_of(REMOTE, requests=3, ready_first=True)
    core.plan("w")
    report(core, row(core, "r0"), row(core, "r1"))
    before = core.fleet.entries["r0"].acceptance
    report(core, row(core, "r1"), row(core, "r2"), deferred(core, "r0"))
    entry = core.fleet.entries["r0"]
    assert (entry.state, entry.preemptions, entry.acceptance) == (State.RUNNING, 0, before)
    report(core, row(core, "r1"), row(core, "r2"))  # now it is not its drafts that it waits for
    assert (entry.state, entry.preemptions) == (State.PAUSED, 1)
