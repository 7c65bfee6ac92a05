"""A service of several cells under the virtual clock: routed, killed, and compared with one cell."""

from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest
from typer.testing import CliRunner

from laps_sd.cli import app
from laps_sd.simulate_cells import HOT, figures, parse_kill, parse_routes, with_tenants
from scheduler_service.core.policies import make_policy
from scheduler_service.predictor import PredictorKind
from scheduler_service.sim.cells import CellSettings, Fared, Kill, run_cells
from scheduler_service.sim.generate import Synthetic, generate
from scheduler_service.sim.worker import SimFleet

FLEET = SimFleet(slots=2, workers=2, plan_lag=1)
CELLS = CellSettings(4, FLEET, make_policy("fcfs"), PredictorKind.NONE)
JOBS = generate(Synthetic(requests=240, load=0.7, output_mean=60), 3, replace(FLEET, workers=8))


def mean_s(fared: list[Fared]) -> float:
    return fmean(one.latency_s for one in fared)


def test_every_request_ends_once_and_equal_seeds_are_equal() -> None:
    fared = run_cells(JOBS, CELLS)
    assert sorted(one.id for one in fared) == sorted(job.id for job in JOBS)
    assert run_cells(JOBS, CELLS) == fared


def test_two_choices_are_closer_to_one_cell_than_chance_is() -> None:
    one = mean_s(run_cells(JOBS, replace(CELLS, cells=1, fleet=replace(FLEET, workers=8))))
    chosen, drawn = (mean_s(run_cells(JOBS, replace(CELLS, route=route))) for route in ("p2c", "random"))
    assert one <= 1.01 * chosen < drawn


def test_a_tenants_cell_gets_its_requests_only_while_it_has_room() -> None:
    few = generate(Synthetic(requests=240, load=0.4, output_mean=60), 3, replace(FLEET, workers=8))
    light, heavy = ([replace(job, tenant=HOT) for job in jobs] for jobs in (few, JOBS))
    counts = Counter(one.cell for one in run_cells(light, replace(CELLS, route="affinity")))
    (most, second, _, _) = sorted(counts.values(), reverse=True)
    assert most > 2 * second
    by_room, by_name = (mean_s(run_cells(heavy, replace(CELLS, route=route))) for route in ("affinity", "hash"))
    assert by_room < 0.9 * by_name


def test_processes_change_nothing() -> None:
    few = JOBS[:20]
    assert sorted(run_cells(few, CELLS)) == sorted(run_cells(few, replace(CELLS, processes=2)))


def test_what_a_killed_cell_had_waits_for_it_and_what_comes_goes_elsewhere() -> None:
    kill = Kill(1, JOBS[120].arrival_s, 5.0)
    fared, arrived_s = run_cells(JOBS, replace(CELLS, kill=kill)), {job.id: job.arrival_s for job in JOBS}
    assert len(fared) == len(JOBS)
    while_down = [one for one in fared if kill.at_s <= arrived_s[one.id] < kill.at_s + kill.down_s]
    assert while_down
    assert all(one.cell != 1 for one in while_down)
    before = [one for one in fared if one.cell == 1 and arrived_s[one.id] < kill.at_s]
    assert any(arrived_s[one.id] + one.latency_s > kill.at_s for one in before)
    assert not any(kill.at_s < arrived_s[one.id] + one.latency_s < kill.at_s + kill.down_s for one in before)


def test_a_hot_tenant_sends_its_share() -> None:
    hot = [job for job in with_tenants(JOBS, 0.5, 1) if job.tenant == HOT]
    assert 90 < len(hot) < 150


def test_the_flags_are_understood_or_told() -> None:
    assert parse_kill("3@60", 4, 10.0) == Kill(3, 60.0, 10.0)
    assert parse_routes("random,p2c") == ["p2c", "random"]
    for wrong in ("4@60", "x"):
        with pytest.raises(ValueError, match="is not CELL@SECOND, with a cell from 0 to 3"):
            parse_kill(wrong, 4, 10.0)
    with pytest.raises(ValueError, match="is not of p2c, affinity, hash, random"):
        parse_routes("p2c,best")


def test_the_command_prints_a_row_for_each_route() -> None:
    words = ["simulate", "--workload", "synthetic:requests=40", "--policy", "fcfs", "--cells", "2", "--processes", "1"]
    said = CliRunner().invoke(app, [*words, "--route", "p2c,hash", "--ideal", "--hot-tenant", "0.5"])
    assert said.exit_code == 0, said.output
    assert [line.split()[0] for line in said.output.splitlines()[1:4]] == ["p2c", "hash", "one"]


def test_requests_that_no_worker_can_hold_have_failed() -> None:
    words = ["simulate", "--workload", "synthetic:requests=40", "--policy", "fcfs", "--cells", "2", "--processes", "1"]
    said = CliRunner().invoke(app, [*words, "--kv-budget-tokens", "10"])
    assert said.exit_code == 0, said.output
    assert said.output.split()[:3] == ["route", "completed", "failed"]
    assert said.output.splitlines()[1].split() == ["p2c", "0", "40", "0", "0"]


def test_a_percentile_is_between_its_neighbours_as_everywhere() -> None:
    row = figures([Fared(str(n), "", float(n), 0) for n in range(1, 101)], 101)
    assert (row["completed"], row["failed"]) == (100, 1)
    assert row["p99_e2el_ms"] == pytest.approx(99_010)


def test_one_tenant_may_send_everything() -> None:
    row = figures([Fared("r", HOT, 1.0, 0)], 1)
    assert row["hot_mean_ms"] == 1000
    assert "others_mean_ms" not in row
