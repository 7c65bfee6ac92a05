"""`laps-sd bench scheduler`: its peers speak like real ones, and a cell's figures come from the processes."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laps_sd import cli
from laps_sd.schedbench.peers import Gateway, Worker
from scheduler_service.store import MemoryStore
from tests.scheduler.live import scheduler
from tests.waiting import until


async def test_a_queue_stays_full_while_requests_end_and_every_token_is_accepted() -> None:
    async with scheduler(MemoryStore()) as (leader, target), asyncio.TaskGroup() as tasks:
        worker, gateway = Worker(target, 0, slots=4), Gateway(target, seed=0)
        running = [tasks.create_task(worker.run())]
        await worker.attached.wait()
        running.append(tasks.create_task(gateway.run()))
        await gateway.fill(12)
        assert len(leader.core.entries) == 12
        worker.go.set()

        async def some_ended() -> bool:
            return gateway.ended >= 20

        await until(some_ended)
        # No row of its reports was stale: what it counted is what the scheduler counted.
        assert leader.insight.counts["finished"] >= 20
        assert leader.sessions["worker-0"].tokens == leader.insight.counts["tokens"] > 20
        for task in running:
            task.cancel()


def test_a_cell_is_measured_on_processes_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["--workers", "1", "--waiting", "5", "--slots", "2", "--seconds", "0.5", "--json", str(file)]
    result = CliRunner().invoke(cli.app, ["bench", "scheduler", *words])
    assert result.exit_code == 0, result.output
    (cell,) = json.loads(file.read_text())["cells"]
    assert (cell["workers"], cell["waiting"]) == (1, 5)
    assert 0 <= cell["redis_share"] < 1  # the system counts processor time in hundredths of a second
    assert cell["commands_per_cpu_s"] > 0 < cell["commands_per_s"]
    assert cell["p50_ms"] <= cell["p99_ms"] <= cell["max_ms"]


async def test_a_scheduler_that_refuses_ends_the_bench() -> None:
    async with scheduler(MemoryStore()) as (_, target):
        gateway = Gateway(target, seed=0)  # and no worker
        filling = asyncio.create_task(gateway.fill(1))
        with pytest.raises(ConnectionError, match="no warmed worker"):
            await gateway.run()
        filling.cancel()
