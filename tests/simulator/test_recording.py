"""What the event log of a live scheduler tells: requests, rounds, steps and their costs."""

from pathlib import Path

import pytest

from scheduler_service.core.beliefs import Expected, Length
from scheduler_service.core.costs import CostProfile
from scheduler_service.core.events import Round, StepDone, Submitted, WorkerDown, WorkerUp
from scheduler_service.core.types import Plan, Request, Run
from scheduler_service.event_log import EventLog
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.recording import Recording, Seen, Shape, explained_lengths, fitted, read_events

EXPECTED = Expected(Length(3.0, 0.5), 0.6)


def row(id: str, start: int, new: int, drafted: int = 0, accepted: int = 0, prefilled: int = 0) -> Round:
    return Round(id, 1, start, new, drafted, accepted, prefilled, 0, 1)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two requests on two slots; `a` pauses for a step."""
    events = EventLog(tmp_path / "events.jsonl")
    events.event(0.0, WorkerUp("w", 2, 10, 64, 4, CostProfile()))
    for id in "ab":
        events.event(0.0, Submitted(Request(id, 0.0, 7, 32, expected=EXPECTED if id == "a" else None)))
    steps = (
        (row("a", 0, 1, prefilled=7), row("b", 0, 0, prefilled=4)),
        (row("b", 0, 3, 2, 2, prefilled=3),),
        (row("a", 1, 2, 4, 1), row("b", 3, 1, 1, 0)),
        (row("a", 1, 2, 4, 1),),  # stale: these tokens are there
    )
    for number, step in enumerate(steps):
        events.event(1.0 + number, StepDone("w", step, 9, 0.01))
    events.close()
    return tmp_path / "events.jsonl"


def test_rounds_that_emitted_are_recorded_with_their_drafts(log: Path) -> None:
    requests = read_events(log).requests
    assert (requests["a"].drafted, requests["a"].accepted, requests["a"].output_tokens) == ([0, 4], [0, 1], 3)
    assert (requests["b"].drafted, requests["b"].accepted, requests["b"].output_tokens) == ([2, 1], [2, 0], 4)
    assert (requests["a"].expected, requests["b"].expected) == (EXPECTED, None)


def test_a_round_of_what_a_plan_gave_away_meanwhile_is_not_recorded(tmp_path: Path) -> None:
    """Its KV is dropped at the end of the round in hand, whose tokens then come once more."""
    events = EventLog(tmp_path / "events.jsonl")
    events.event(0.0, Submitted(Request("a", 0.0, 7, 32)))
    events.plan("w", Plan((Run("a", 1, 4, 256),), ()))
    events.plan("w", Plan((), drop=("a",)))
    events.event(1.0, StepDone("w", (row("a", 0, 3, 4, 2),), 9, 0.01))
    events.plan("w", Plan((Run("a", 2, 4, 256),), ()))
    events.event(2.0, StepDone("w", (Round("a", 2, 0, 2, 4, 1, 0, 0, 1),), 9, 0.01))
    events.close()
    seen = read_events(tmp_path / "events.jsonl").requests["a"]
    assert (seen.output_tokens, seen.accepted) == (2, [1])


def test_steps_are_counted_by_what_their_time_depends_on(log: Path) -> None:
    recording = read_events(log)
    assert recording.kv_tokens == 640
    assert (Shape(drafts=4, batch=2, verified=7, prefilled=0, resumed=1), 3.0, 0.01) in recording.timeline
    assert [0, 2, 1, 11, 0, 1, 0.01] in recording.steps()


def test_deaths_of_the_worker_are_recorded_but_not_when_it_leaves(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl")
    events.event(1.0, WorkerDown("w", died=True))
    events.event(2.0, WorkerDown("w"))
    up = WorkerUp("w", 2, 10, 64, 4, CostProfile())
    for at in (3.0, 4.0):  # the older connection was not seen to end
        events.event(at, up)
    events.close()
    assert read_events(tmp_path / "events.jsonl").lost_s == [1.0, 4.0]


def test_a_log_cut_short_loses_that_line_alone(log: Path) -> None:
    """A scheduler that was killed in mid-line appends to that line once it is started again."""
    log.write_text(log.read_text() + '{"now":1,"kind":"Step')
    assert len(read_events(log).requests) == 2
    events = EventLog(log)
    events.event(9.0, Submitted(Request("lost", 0.0, 7, 32)))
    events.event(9.0, Submitted(Request("c", 0.0, 7, 32)))
    events.close()
    assert set(read_events(log).requests) == {"a", "b", "c"}


def test_costs_are_found_again_from_the_steps_they_made() -> None:
    costs = StepCosts(0.5, 8.0, 0.1, 0.2, 0.3, 1.5)
    shapes = [
        Shape(drafts, batch, batch + batch * drafts, prefilled, resumed)
        for drafts in (0, 2, 4)
        for batch in (1, 2, 4)
        for prefilled, resumed in ((0, 0), (64, 0), (0, 1))
    ]
    steps = [[*s, 3, 3 * costs.step_s(s.drafts, s.batch, s.verified, s.prefilled, s.resumed)] for s in shapes]
    found = fitted(steps)
    for name in StepCosts.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(costs, name), abs=1e-6), name


def test_no_cost_is_negative_and_no_steps_are_refused() -> None:
    assert fitted([[0, 1, 1, 0, 0, 1, 0.01], [4, 1, 5, 0, 0, 1, 0.005]]).t_draft_ms == 0
    with pytest.raises(ValueError, match="no steps"):
        fitted([])


def test_what_predictions_explain_is_one_at_best_and_nothing_for_silence() -> None:
    sure = [(Expected(Length(float(x), 1.0)), round(2.718281828**x), 1000) for x in (4, 5, 6)]
    assert explained_lengths(sure) == pytest.approx(1, abs=1e-3)
    assert explained_lengths([(None, 10, 1000), (None, 100, 1000)]) == pytest.approx(0)


def test_slow_moments_of_a_machine_are_taken_out_of_latencies() -> None:
    """Steps cost 1 s each; the second took 5. Nothing ran from 1 to 3, when `b` came."""
    shape = Shape(drafts=0, batch=1, verified=1, prefilled=0, resumed=0)
    recording = Recording(timeline=[(shape, 1.0, 1.0), (shape, 8.0, 5.0), (shape, 9.0, 1.0)])
    recording.requests = {
        "a": Seen(8, None, arrived_s=-1.0, ended_s=1.0),  # waited for a second before the first step
        "b": Seen(8, None, arrived_s=3.0, ended_s=9.0),
        "c": Seen(8, None, arrived_s=5.5, ended_s=9.0),  # in the middle of the slow step
        "live": Seen(8, None, arrived_s=9.0),
    }
    steady = recording.steadily(StepCosts(0, 1000, 0, 0, 0))
    assert {id: latency_s for id, (_, latency_s) in steady.items()} == pytest.approx({"a": 2, "b": 2, "c": 1.5})
    assert steady["b"][0] - steady["a"][0] == pytest.approx(4)
