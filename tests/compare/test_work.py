"""A comparison that was stopped goes on where it was: with runs that cost nothing in place of services."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from laps_sd.compare import identity, live
from laps_sd.compare.design import Cell, Drawn, Run, runs
from laps_sd.compare.folder import Folder, OtherSettings, write
from laps_sd.compare.prompts import own_prompts
from laps_sd.compare.work import ATTEMPTS, Work
from laps_sd.loadtest.plan import Planned
from laps_sd.stack import Options
from tests.compare.builders import SETTINGS, found

CELLS = {Cell(2, load): ["fcfs", "las"] for load in ("burst", "0.85")}
ASKED = list(dict.fromkeys(runs(CELLS, 2, seed=0)))
Bench = Callable[..., Work]


class Services:
    """In place of live ones. `begun`: the options of each run; `faults`: what the next ones are disturbed by;
    `made_with`: their weights and libraries."""

    def __init__(self) -> None:
        self.made_with = {"model": "m", "torch": "2"}
        self.begun: list[Options] = []
        self.faults: list[str] = []
        self.stop_at: int | None = None
        self.rates: list[float] = []

    def measure(self, options: Options, plan: Sequence[Planned], *rest: Any) -> dict[str, Any]:
        if len(self.begun) == self.stop_at:
            raise live.Interrupted
        self.begun.append(options)
        self.rates.append(plan[-1].due_s or 0.0)
        faults = (self.faults.pop(0),) if self.faults else ()
        figures = found(ASKED[0], [1.0] * len(plan), faults=faults)
        return {name: figures[name] for name in ("results", "faults", "scheduler", "steps", "requests")}


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Services:
    services = Services()
    monkeypatch.setattr(live, "measure", services.measure)
    monkeypatch.setattr(live, "teach", lambda *given: {"results": {"failed": 0}})
    monkeypatch.setattr(live, "as_json", lambda measured, *given: measured)
    monkeypatch.setattr(identity, "made_with", lambda *given: services.made_with)
    return services


def work(path: Path, *, tolerant: bool = False) -> Work:
    return Work(Folder(path, SETTINGS), Drawn(own_prompts(), SETTINGS), SETTINGS, Options(), tolerant=tolerant)


def test_only_what_is_missing_is_done(tmp_path: Path, services: Services) -> None:
    services.stop_at = 3
    with pytest.raises(live.Interrupted):
        work(tmp_path).through(ASKED, None)
    services.stop_at = None
    assert work(tmp_path).through(ASKED, None) == 0
    assert len(services.begun) == len(ASKED)
    assert work(tmp_path).through(ASKED, None) == 0
    assert len(services.begun) == len(ASKED)


def test_a_disturbed_run_is_done_again_and_counts_only_undisturbed(tmp_path: Path, services: Services) -> None:
    services.faults = ["a stall"]
    assert work(tmp_path).through(ASKED, None) == 0
    assert len(services.begun) == len(ASKED) + 1


def test_with_a_disturbed_capacity_no_load_is_run(tmp_path: Path, services: Services) -> None:
    services.faults = ["a stall"] * ATTEMPTS
    one = [run for run in ASKED if run.repetition == 1]
    assert work(tmp_path).through(one, None) == len(one) - 1
    assert [options.policy for options in services.begun] == [*["fcfs"] * ATTEMPTS, "las"]  # which needs no capacity
    assert work(tmp_path, tolerant=True).through(one, None) == 0


def test_loads_are_run_anew_when_their_capacity_was(tmp_path: Path, services: Services) -> None:
    work(tmp_path).through(ASKED, None)
    folder = Folder(tmp_path, SETTINGS)
    capacity = folder[ASKED[0].capacity]
    folder.add(ASKED[0].capacity, capacity | {"results": {"request_throughput": 2.0}})
    assert work(tmp_path).through(ASKED, None) == 0
    again = [run for run in ASKED if run.cell.load != "burst" and run.repetition == 1]
    assert len(services.begun) == len(ASKED) + len(again)
    assert services.rates[-1] == pytest.approx(services.rates[2] / 2)


def test_a_run_by_other_code_of_a_policy_of_ones_own_is_run_anew(
    tmp_path: Path, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own_policy_of_a_comparison.py"
    file.write_text("from scheduler_service.core.policies.fcfs import Fcfs as Own\n")
    monkeypatch.syspath_prepend(tmp_path)
    kind = SimpleNamespace(__mro__=[SimpleNamespace(__module__=file.stem)])
    monkeypatch.setattr(identity, "find_policy", lambda name: kind)
    monkeypatch.setitem(sys.modules, file.stem, SimpleNamespace(__file__=str(file)))
    cells = {Cell(2, "burst"): ["fcfs", f"{file.stem}.Own"]}
    asked = list(runs(cells, 1, seed=0))
    for _ in range(2):
        assert work(tmp_path).through(asked, None) == 0
    assert len(services.begun) == 2
    file.write_text(file.read_text() + "# changed\n")
    assert work(tmp_path).through(asked, None) == 0
    assert [options.policy for options in services.begun[2:]] == [f"{file.stem}.Own"]


def test_loads_whose_capacity_was_removed_are_missing(tmp_path: Path, services: Services) -> None:
    work(tmp_path).through(ASKED, None)
    (tmp_path / "runs" / f"{ASKED[0].capacity.name}.json").unlink()
    of_it = [run for run in ASKED if run.capacity == ASKED[0].capacity and run.cell.load != "burst"]
    assert work(tmp_path).through(ASKED, 0.0) == 1 + len(of_it)


def test_no_run_begins_after_its_time(tmp_path: Path, services: Services) -> None:
    assert work(tmp_path).through(ASKED, 0.0) == len(ASKED)
    assert not services.begun


def test_no_second_attempt_begins_after_its_time(
    tmp_path: Path, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the clock is a second after the one before, so a run takes one."""
    services.faults = ["a stall"]
    monkeypatch.setattr("laps_sd.compare.work.time", SimpleNamespace(monotonic=count().__next__))
    work(tmp_path).through(ASKED, 4 / 60)
    assert len(services.begun) == 1


def test_each_run_has_its_own_policy(tmp_path: Path, services: Services) -> None:
    work(tmp_path).through(ASKED, None)
    assert Counter(options.policy for options in services.begun) == {"fcfs": 4, "las": 4}


def test_a_folder_of_other_settings_is_refused_by_name(tmp_path: Path) -> None:
    Folder(tmp_path, SETTINGS)
    Folder(tmp_path, SETTINGS)
    with pytest.raises(OtherSettings, match="with another code, draft_len: they cannot be compared"):
        Folder(tmp_path, replace(SETTINGS, code="other", draft_len=3))


@pytest.mark.parametrize("other", [{"model": "retrained", "torch": "2"}, {"model": "m", "torch": "3"}])
def test_runs_of_other_weights_or_libraries_are_not_mixed(
    tmp_path: Path, services: Services, other: dict[str, str]
) -> None:
    work(tmp_path).through(ASKED[:1], None)
    services.made_with = other
    with pytest.raises(OtherSettings, match=r"holds runs with another (model|torch):"):
        work(tmp_path).through(ASKED, None)
    assert len(services.begun) == 1


def test_a_run_cut_short_while_it_was_written_is_missing(tmp_path: Path) -> None:
    folder, run = Folder(tmp_path, SETTINGS), ASKED[0]
    (tmp_path / "runs" / f"{run.name}.part").write_text('{"faults"')
    assert not folder.has(run, faulty=True)
    folder.add(run, {"faults": []})
    assert folder.has(run, faulty=False)
    assert Run.of_json(folder[run]["run"]) == run
    write(tmp_path / "x.json", {})


def test_a_lesson_that_is_not_learned_ends_the_comparison(
    tmp_path: Path, services: Services, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def teach(*given: Any) -> None:
        raise live.Untaught("the predictor did not learn")

    monkeypatch.setattr(live, "teach", teach)
    with pytest.raises(typer.Exit):
        work(tmp_path).through(ASKED, None)
    assert "laps-sd: the predictor did not learn" in capsys.readouterr().err
    assert not services.begun
