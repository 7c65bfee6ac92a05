"""For how long an event loop is held: watched from outside the service, by turn and by call."""

import subprocess
import sys
from pathlib import Path

from laps_sd.schedbench import watched
from laps_sd.schedbench.stalls import Scale, Watch, measure
from laps_sd.stack import Options

HELD_S = 0.02
SERVICE = f"""
import asyncio, time

async def hold():
    began = time.thread_time()
    while time.thread_time() < began + {HELD_S}:
        pass

async def serve():
    await asyncio.sleep(0)
    await asyncio.create_task(hold())
    await asyncio.sleep(0)

if __name__ == "__main__":
    asyncio.run(serve())
"""


def test_a_call_that_holds_the_loop_is_measured_and_named(tmp_path: Path) -> None:
    (tmp_path / "slow_service.py").write_text(SERVICE)
    watch = Watch(tmp_path, "figures")
    script = watched.__file__
    subprocess.run([sys.executable, script, str(tmp_path / "figures"), "slow_service"], cwd=tmp_path, check=True,
                   env={"PYTHONPATH": str(tmp_path)})  # fmt: skip
    held = watch.held()
    assert held["call"].endswith("slow_service.py: hold")
    assert held["turn_cpu_ms"] >= held["call_cpu_ms"] >= 1000 * HELD_S
    watch.figures.reset()
    assert (watch.held()["turn_ms"], watch.held()["call"]) == (0.0, "")


async def test_both_services_are_watched_while_streams_link_again_and_workers_come_and_go() -> None:
    options = Options(max_backlog_s="inf", log_level="warning", grpc_port=0)
    scale = Scale(live=40, gateways=3, streams=8, rounds=3, slots=4, seconds=0.1)
    stalls = await measure(options, scale)
    assert len({stall["event"] for stall in stalls}) == len(stalls) == 6
    for stall in stalls:
        assert stall["scheduler"]["turn_cpu_ms"] >= stall["scheduler"]["collected_cpu_ms"] >= 0
    assert any(stall["gateway"]["turn_cpu_ms"] > 0 for stall in stalls)  # of a short event it may see nothing
