"""Readings of a probe: believed once they have shown that they foretell, and then what the order follows."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from protos.errors import BadInput
from protos.link.v1 import worker_link_pb2 as pb
from scheduler_service import reports
from scheduler_service.core.beliefs import FleetAcceptance, FleetLength, Length
from scheduler_service.core.core import Core
from scheduler_service.core.events import Round, StepDone, Submitted
from scheduler_service.core.probed import BINS, MOST_KEPT, FleetProbe, Kept, Reading, former, reading
from scheduler_service.core.types import Finish, Plan
from scheduler_service.event_log import EventLog, replay
from scheduler_service.learned import Learned, decode
from tests.scheduler.builders import core, request, worker_up

USUAL = 5.0  # ln(tokens)


def taught(tells: Callable[[float, Random], float], *, requests: int = 200, seed: int = 1) -> FleetProbe:
    """By requests whose ln(tokens) are drawn, and whose readings after the first token are `tells` of that."""
    probe, rng = FleetProbe(), Random(seed)
    for _ in range(requests):
        true = rng.gauss(USUAL, 1.0)
        probe.observe([Kept(1, USUAL, tells(true, rng))], 1 + max(1, round(math.exp(true))), cut=False)
    return probe


def good(true: float, rng: Random) -> float:
    return true + rng.gauss(0, 0.3)


def noise(true: float, rng: Random) -> float:
    return rng.gauss(USUAL, 1.0)


def test_the_location_of_a_reading_is_the_mean_over_its_bins() -> None:
    chances = [255] * BINS
    chances[3] = chances[4] = 11  # half and half: from 8 to 32 tokens
    assert reading(7, bytes(chances)).location == pytest.approx(math.log(16), abs=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_readings_that_tell_nothing_are_not_believed(seed: int) -> None:
    assert taught(noise, seed=seed).belief(Kept(1, USUAL, USUAL + 2)) is None


def test_nothing_is_believed_before_requests_have_ended() -> None:
    assert FleetProbe().belief(Kept(1, USUAL, USUAL + 2)) is None


@pytest.mark.parametrize("seed", range(5))
def test_four_of_five_lengths_lie_in_the_interval_of_readings_that_tell(seed: int) -> None:
    probe, rng, within = taught(good, seed=seed), Random(100 + seed), 0
    for _ in range(1000):
        true = rng.gauss(USUAL, 1.0)
        believed = probe.belief(Kept(1, USUAL, good(true, rng)))
        assert believed is not None
        assert believed.spread < 0.5
        within += abs(true - believed.location) <= 1.2816 * believed.spread
    assert 720 <= within <= 880


def test_a_wrong_scale_of_readings_is_put_right() -> None:
    believed = taught(lambda true, rng: 2 * true - 3 + rng.gauss(0, 0.2)).belief(Kept(1, USUAL, 2 * 6.0 - 3))
    assert believed is not None
    assert believed.location == pytest.approx(6.0, abs=0.2)


def test_readings_that_turn_bad_are_left_out_again() -> None:
    probe, rng = taught(good, requests=2000), Random(2)
    for _ in range(300):
        probe.observe([Kept(1, USUAL, rng.gauss(USUAL, 1.0))], 1 + round(math.exp(rng.gauss(USUAL, 1.0))), cut=False)
        if probe.belief(Kept(1, USUAL, USUAL)) is None:
            return
    raise AssertionError("still believed")


def test_an_answer_that_its_bound_cut_counts_as_a_longer_one() -> None:
    """Half of the answers end at 150 tokens; without that the median would be believed to be less."""
    probe, rng = FleetProbe(), Random(3)
    for _ in range(400):
        true = rng.gauss(USUAL, 0.8)
        tokens = 1 + max(1, round(math.exp(true)))
        kept = Kept(1, USUAL, true + rng.gauss(0, 0.3))
        probe.observe([kept], min(150, tokens), cut=tokens > 150)
    believed = probe.belief(Kept(1, USUAL, 6.0))
    assert believed is not None
    assert believed.location > 5.5


def test_what_remains_by_a_former_belief_is_its_median_beyond_the_age() -> None:
    length, rng = Length(5.0, 1.0), Random(4)
    beyond = sorted(x - 200 for x in (math.exp(rng.gauss(5.0, 1.0)) for _ in range(40_000)) if x > 200)
    assert former(length, 200) == pytest.approx(math.log(beyond[len(beyond) // 2]), abs=0.05)
    assert former(length, 10**6) > 10  # far beyond what is believed: long, and finite


# ---- in the core ----


def row(plan: Plan, id: str, start: int, new: int, **more: object) -> Round:
    run = next(run for run in plan.schedule if run.id == id)
    return Round(id, run.placement, start, new, 0, 0, 0 if start else 4, 0, 1, **more)  # type: ignore[arg-type]


def two_running(own: Core, told: bool = True) -> Core:
    """Both have begun; by their readings `b` is nearly done."""
    own.observe(worker_up(slots=2), 0.0)
    for id in "ab":
        own.observe(Submitted(request(id)), 0.0)
    plan = own.plan("w")
    rows = [
        row(plan, id, 0, 1, reading=Reading(1, math.log(rest)) if told else None) for id, rest in (("a", 400), ("b", 4))
    ]
    own.observe(StepDone("w", tuple(rows), 900, 1.0), 1.0)
    return own


def order(own: Core) -> list[str]:
    return [run.id for run in own.plan("w").schedule]


def test_readings_change_no_plan_until_they_are_believed() -> None:
    assert two_running(core("gittins")).plan("w") == two_running(core("gittins"), told=False).plan("w")


def test_who_is_nearly_done_by_a_believed_reading_goes_first() -> None:
    own = core("gittins")
    own.fleet.known.probe = taught(good)
    assert order(two_running(own)) == ["b", "a"]
    entry = own.fleet.entries["b"]
    assert entry.since == 1
    assert entry.remaining_tokens < 20 < own.fleet.entries["a"].remaining_tokens


def test_what_is_believed_after_a_reading_counts_from_there() -> None:
    own = core("gittins")
    own.fleet.known.probe = taught(good)
    entry = two_running(own).fleet.entries["a"]
    before, plan = entry.remaining_tokens, own.plan("w")
    own.observe(StepDone("w", (row(plan, "a", 1, 3),), 900, 1.0), 2.0)
    assert entry.remaining_tokens < before
    own.fleet._expect(entry)  # what finished requests teach of unread ones is not news
    assert entry.since == 1


def test_a_belief_from_a_reading_goes_with_the_next_one_if_readings_are_left_out_meanwhile() -> None:
    own = core("gittins")
    own.fleet.known.probe = taught(good)
    entry = two_running(own).fleet.entries["a"]
    own.fleet.known.probe = FleetProbe()
    own.observe(StepDone("w", (row(own.plan("w"), "a", 1, 1, reading=Reading(2, 9.0)),), 900, 1.0, partial=True), 2.0)
    assert entry.since == 0
    assert entry.length == own.fleet.known.belief(entry.request).at_least(own.fleet.policy.surest)


def test_a_request_that_ends_teaches_and_few_of_its_readings_are_kept() -> None:
    own = two_running(core("gittins"))
    emitted = 1
    for number in range(2 * MOST_KEPT):
        plan = own.plan("w")
        told = row(plan, "b", emitted, 1, reading=Reading(emitted + 1, 3.0))
        own.observe(StepDone("w", (told,), 900, 1.0, partial=True), 2.0 + number)
        emitted += 1
    assert len(own.fleet.entries["b"].readings) == MOST_KEPT
    last = row(own.plan("w"), "b", emitted, 1, finish=Finish.STOP)
    own.observe(StepDone("w", (last,), 900, 1.0, partial=True), 99.0)
    assert [round(stage.both.n, 2) for stage in own.fleet.known.probe.stages] == [1.0, 1.0]


# ---- around it ----


@pytest.mark.parametrize(
    ("after", "chances"), [(0, bytes(BINS)), (1, bytes(BINS - 1)), (1, b""), (4, bytes(BINS)), (9, bytes(BINS))]
)
def test_a_reading_that_cannot_be_is_refused(after: int, chances: bytes) -> None:
    """The row is of the tokens 5 to 8."""
    remaining = pb.Remaining(after=after, chances=chances)
    told = pb.Row(request_id="a", start=4, tokens=[1, 2, 3, 4], remaining=remaining)
    with pytest.raises(BadInput, match="reading"):
        reports.read("w", pb.StepReport(rows=[told]))


def test_a_reading_reaches_the_core() -> None:
    remaining = pb.Remaining(after=6, chances=bytes(BINS))
    step, _ = reports.read(
        "w", pb.StepReport(rows=[pb.Row(request_id="a", start=4, tokens=[1, 2], remaining=remaining)])
    )
    assert step.rounds[0].reading == reading(6, bytes(BINS))


def test_the_next_leader_knows_what_readings_are_worth() -> None:
    probe = taught(good)
    learned = Learned(FleetLength(), FleetAcceptance.at(4), probe=probe)
    assert decode(learned.encode()).probe == probe


def test_a_log_with_readings_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "events"
    own, log = core("gittins"), EventLog(path)
    own.fleet.known.probe = taught(good)
    log.leading(own)
    events = [(0.0, worker_up(slots=1)), (0.0, Submitted(request("a"))), (0.0, Submitted(request("b")))]
    for now, event in events:
        log.event(now, event)
        own.observe(event, now)
    for number, (id, rest) in enumerate((("a", 400.0), ("b", 4.0), ("b", 3.0)), 1):
        plan = own.plan("w")
        log.plan("w", plan)
        start = own.fleet.entries[id].emitted
        told = replace(row(plan, id, start, 1), reading=Reading(start + 1, math.log(rest)))
        step = StepDone("w", (told,), 900, 1.0)
        log.event(float(number), step)
        own.observe(step, float(number))
    log.plan("w", own.plan("w"))
    log.close()
    plans = list(replay(path, lambda: core("gittins")))
    assert len(plans) == 4
    assert all(logged == rebuilt for _, logged, rebuilt in plans)
