"""A pace means the same to the simulator, which tells what steps cost on it, and to the worker, which keeps it."""

import json
from pathlib import Path

import pytest
from pydantic_settings import CliApp

from laps_sd.compare.pace import for_worker, pace_of
from laps_sd.stack import Options, worker_command
from worker_service.config import Settings
from worker_service.engine.types import CostProfile

PACE = pace_of("t_verify_ms=13,t_verify_slope=0.04,t_token_ms=0.23,t_draft_ms=0.08,t_prefill_ms_per_token=0.32")


@pytest.mark.parametrize(("drafts", "prefilled"), [([4], 0), ([4, 4], 0), ([4, 2, 0], 7)])
def test_a_worker_takes_for_a_round_what_the_simulator_does(drafts: list[int], prefilled: int) -> None:
    worker = CostProfile(**json.loads(for_worker(PACE)))
    verified = sum(draft + 1 for draft in drafts)
    simulated_s = PACE.step_s(max(drafts), len(drafts), verified, prefilled, 0)
    assert worker.step_s(drafts, prefilled) == pytest.approx(simulated_s)


def test_a_worker_is_started_with_the_pace() -> None:
    words = worker_command(Options(pace=for_worker(PACE)), 0, "127.0.0.1:1", Path("model")).arguments
    pace = CliApp.run(Settings, cli_args=words[words.index("worker_service") + 1 :]).pace
    assert pace == CostProfile(**json.loads(for_worker(PACE)))


def test_what_is_not_named_costs_nothing() -> None:
    assert pace_of("t_verify_ms=10").step_s(8, 4, 36, 100, 3) == pytest.approx(0.01)
