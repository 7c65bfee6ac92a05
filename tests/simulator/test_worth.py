"""The worth of acceptance: the map, the marks on it, and what is said of it."""

import json
from pathlib import Path
from random import Random

import pytest

from scheduler_service.core.policies import LapsSd
from scheduler_service.sim import worth
from scheduler_service.sim.phases import Phases, phases, watched
from scheduler_service.sim.simulator import simulate
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job
from tests.simulator.builders import SECOND, job


def drawn(chances: list[float], rounds: int = 400) -> list[Job]:
    """Requests that accept each of four drafts with their own chance."""
    rng = Random(5)
    jobs = []
    for index, chance in enumerate(chances):
        script = tuple(next((n for n in range(4) if rng.random() >= chance), 4) for _ in range(rounds))
        jobs.append(job(str(index), 0.0, sum(script) + rounds, script))
    return jobs


def test_the_spread_of_acceptance_is_told_from_luck() -> None:
    assert worth.spread_of(drawn([0.5, 0.7] * 40)) == pytest.approx(0.1, abs=0.01)
    assert worth.spread_of(drawn([0.6] * 80, rounds=20)) < 0.04


def test_the_spread_that_a_point_asks_for_is_that_of_its_workload() -> None:
    what = worth.Point(spread=0.15).workload(10)
    assert (what.alpha * (1 - what.alpha) / (what.alpha_strength + 1)) ** 0.5 == pytest.approx(0.15)


def test_it_is_worth_nothing_where_acceptance_is_the_same() -> None:
    found = worth.worth(worth.Point(spread=0.0, length_cv=1.1), 30, seed=1)
    assert abs(found["gittins"]) < 0.05


@pytest.mark.parametrize(("value", "place"), [(0.0, 0), (0.075, 1.5), (0.3, 4), (0.9, 4)])
def test_a_mark_lies_between_its_ticks(value: float, place: float) -> None:
    assert worth._place(worth.SPREADS, value) == pytest.approx(place)


def test_how_long_the_phases_last_is_told() -> None:
    """Steady acceptance is stable after eight rounds; a request of four rounds never is."""
    jobs = [job("steady", 0, 100, (4,)), job("short", 0, 20, (4,))]
    policy = watched(LapsSd())
    trace = simulate(jobs, policy, SimFleet(costs=SECOND))
    assert phases(policy, trace) == Phases(perceptible=0.5, half_round=8, before=(8 + 4) / 24)


def test_marks_of_logs_stay_and_those_of_kinds_are_made_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log, stale = ({"name": name, "spread": 0.5, "length_cv": 0.5} for name in ("medusa", "poetry"))
    (tmp_path / "worth.json").write_text(json.dumps({"marks": [log, stale]}))
    monkeypatch.setattr(worth, "measure", lambda *flags: [{}])
    monkeypatch.setattr(worth, "draw", lambda results: "")
    monkeypatch.setattr("sys.argv", ["worth", "--out", str(tmp_path)])
    worth.main()
    marks = json.loads((tmp_path / "worth.json").read_text())["marks"]
    assert marks == [*worth.marks(None), log]
