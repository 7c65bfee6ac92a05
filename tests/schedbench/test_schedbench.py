"""`laps-sd bench scheduler`: its peers speak like real ones, and a cell's figures come from the processes."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from laps_sd import cli
from laps_sd.schedbench import against
from laps_sd.schedbench.cells import Shape
from laps_sd.schedbench.gateways import Gateway, fill
from laps_sd.schedbench.peers import running
from laps_sd.schedbench.workers import Worker
from scheduler_service.core.lifecycle import State
from scheduler_service.store import MemoryStore
from tests.scheduler.live import scheduler
from tests.waiting import until


async def test_a_queue_stays_full_while_requests_end_and_every_token_is_accepted() -> None:
    async with scheduler(MemoryStore()) as (leader, target):
        worker, gateway = Worker(target, 0, slots=4), Gateway(target, seed=0)

        async def some_ended() -> bool:
            return gateway.ended >= 20

        async with running([worker], [gateway]):
            await gateway.fill(12)
            assert len(leader.core.fleet.entries) == 12
            worker.go.set()
            await until(some_ended)
            # No row of its reports was stale: what it counted is what the scheduler counted.
            assert leader.counters.ended[State.FINISHED] >= 20
            assert leader.sessions["worker-0"].tokens == leader.counters.tokens > 20


async def test_gateways_share_the_requests_and_tenants_are_drawn_among_all_of_them() -> None:
    async with scheduler(MemoryStore()) as (leader, target):
        worker, gateways = Worker(target, 0, slots=4), [Gateway(target, 0, number, tenants=3) for number in range(4)]

        async def all_have_ended_some() -> bool:
            return all(gateway.ended for gateway in gateways)

        async def every_row_has_come() -> bool:
            return sum(gateway.tokens for gateway in gateways) == leader.counters.tokens

        async with running([worker], gateways):
            await fill(gateways, 30)
            assert [gateway.live for gateway in gateways] == [7, 7, 8, 8]
            tenants = {entry.request.tenant for entry in leader.core.fleet.entries.values()}
            assert tenants == {"tenant-0", "tenant-1", "tenant-2"}
            worker.go.set()
            await until(all_have_ended_some)
            worker.go.clear()
            await until(every_row_has_come)
            assert sum(gateway.rows for gateway in gateways) <= 4 * worker.rounds


def bench(*words: str) -> Result:
    return CliRunner().invoke(cli.app, ["bench", "scheduler", *words])


def test_a_cell_is_measured_on_processes_of_its_own_and_added_to_the_record(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    other = {"workers": 8, "waiting": 5, "tenants": 1, "gateways": 1}
    file.write_text(json.dumps({"cells": [other], "stalls": []}))
    shape = ["--workers", "1", "--waiting", "5", "--tenants", "2", "--gateways", "2"]
    result = bench(*shape, "--batch", "2", "--seconds", "0.5", "--json", str(file))
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text())
    assert record["slots"] == 2
    assert "stalls" in record
    kept, cell = record["cells"]
    assert kept == other
    assert (cell["workers"], cell["waiting"], cell["tenants"], cell["gateways"]) == (1, 5, 2, 2)
    assert 0 <= cell["redis_share"] < 1  # the system counts processor time in hundredths of a second
    assert cell["commands_per_cpu_s"] > 0 < cell["commands_per_s"]
    assert cell["rows_per_command"] > 0
    assert cell["rows_per_cpu_s"] <= cell["tokens_per_cpu_s"]
    assert cell["p50_ms"] <= cell["p99_ms"] <= cell["max_ms"]


def test_a_record_that_cannot_be_written_is_told_before_anything_is_measured() -> None:
    result = bench("--workers", "1", "--waiting", "1", "--seconds", "0.5", "--json", "/no/such/folder/out.json")
    assert result.exit_code == 2
    assert "cannot be written" in result.output


FAKE_BENCH = """
import json, sys
json.dump({"cells": [{"argv": sys.argv[1:]}]}, open(sys.argv[-1], "w"))
"""


def test_another_checkout_is_measured_by_its_own_bench_with_the_flags_that_it_knows(tmp_path: Path) -> None:
    (tmp_path / "laps_sd").mkdir()
    (tmp_path / "laps_sd" / "cli.py").write_text(FAKE_BENCH)
    words = against.cell_words(Shape(workers=2, waiting=7))  # one tenant and gateway: an old bench has no such flags
    told = against.bench(tmp_path, words)["argv"]
    assert told[:-2] == ["bench", "scheduler", "--workers", "2", "--waiting", "7"]


def test_both_sides_go_first_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    went: list[Path] = []

    def bench(checkout: Path, _: Sequence[str]) -> dict[str, Any]:
        went.append(checkout)
        return {"commands_per_cpu_s": 1.0, "ended_per_command": 1.0}

    monkeypatch.setattr(against, "bench", bench)
    against.compare(Shape(workers=1, waiting=0), tmp_path, [], 4, repetitions=2, say=lambda _: None)
    assert went == [against.OURS, tmp_path, tmp_path, against.OURS]


def test_a_checkout_whose_bench_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "laps_sd").mkdir()
    (tmp_path / "laps_sd" / "cli.py").write_text("raise SystemExit('nothing works here')")
    with pytest.raises(against.OtherFailed, match="nothing works here"):
        against.bench(tmp_path, [])


def test_ratios_are_those_of_rows_and_another_amount_of_work_shows() -> None:
    shape = Shape(workers=1, waiting=0)
    theirs = {"commands_per_cpu_s": 100.0, "ended_per_command": 0.5}  # an old bench: it counts no rows
    ours = [{**theirs, "rows_per_cpu_s": rows, "rows_per_command": 3.0} for rows in (800.0, 1600.0, 1200.0)]
    ratio = against.ratio(shape, ours, [theirs] * 3, slots=4)
    assert (ratio["least"], ratio["median"], ratio["most"]) == (2.0, 3.0, 4.0)
    assert ratio["rows_per_command"] == [3.0, 4.0]


async def test_a_scheduler_that_refuses_ends_the_bench() -> None:
    async with scheduler(MemoryStore()) as (_, target):
        gateway = Gateway(target, seed=0)  # and no worker
        filling = asyncio.create_task(gateway.fill(1))
        with pytest.raises(ConnectionError, match="no warmed worker"):
            await gateway.run()
        filling.cancel()


def test_what_the_record_holds_is_read_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measured(*_: object) -> list[dict[str, float]]:
        return []

    monkeypatch.setattr("laps_sd.schedbench.stalls.measure", measured)
    (record := tmp_path / "record.json").touch()  # as mktemp makes it
    words = ["bench", "scheduler", "--stalls", "--json", str(record)]
    assert CliRunner().invoke(cli.app, words).exit_code == 0
    assert json.loads(record.read_text())["stalls"] == []
    record.write_text("[]")
    refused = CliRunner().invoke(cli.app, words)
    assert (refused.exit_code, record.read_text()) == (2, "[]")
