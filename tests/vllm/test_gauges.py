"""The figures in vLLM's own registry, as the process that serves /metrics shows them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY
from vllm import envs

from laps_sd_vllm import gauges, status

LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(envs, "VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(gauges, "READ_EVERY_S", 0.0)
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls="laps_sd_vllm.LapsSdScheduler"),
        parallel_config=SimpleNamespace(_api_process_rank=0),
        model_config=SimpleNamespace(served_model_name="m", model="m"),
    )


def file() -> Path:
    return status.written(status.folder(Path(envs.VLLM_CACHE_ROOT)), 0)


def test_what_an_engine_process_wrote_is_shown(config: Any) -> None:
    logger = gauges.Gauges(config)
    figures = {"mean_s": 2.0, "p99_s": 9.0, "longest_pause_s": 4.0}
    status.Status("order", "gittins", fallbacks=1, compared=7, policies={"fcfs": figures}).write(file())
    logger.record(None, None)
    assert REGISTRY.get_sample_value("laps_sd_latency_mean_seconds", LABELS | {"policy": "fcfs"}) == 2.0
    assert REGISTRY.get_sample_value("laps_sd_longest_pause_seconds", LABELS | {"policy": "fcfs"}) == 4.0
    assert REGISTRY.get_sample_value("laps_sd_fallbacks_total", LABELS) == 1.0
    assert REGISTRY.get_sample_value("laps_sd_ordering", LABELS) == 0.0
    assert REGISTRY.get_sample_value("laps_sd_compared_requests", LABELS) == 7.0


def test_a_counter_counts_once_what_stands_in_the_file(config: Any) -> None:
    logger = gauges.Gauges(config)
    before = REGISTRY.get_sample_value("laps_sd_plans_total", LABELS) or 0.0
    for plans in (3, 3, 5):
        status.Status("order", "gittins", plans=plans).write(file())
        logger.log()
    assert REGISTRY.get_sample_value("laps_sd_plans_total", LABELS) == before + 5


def test_a_file_that_is_not_there_or_of_another_version_shows_nothing(config: Any) -> None:
    """And what is written later is shown: so it is at the start of each server."""
    logger = gauges.Gauges(config)
    logger.log()
    file().parent.mkdir(parents=True)
    file().write_text('{"schema": 99}')
    logger.log()
    status.Status("order", "gittins", compared=9).write(file())
    logger.log()
    assert REGISTRY.get_sample_value("laps_sd_compared_requests", LABELS) == 9.0


@pytest.mark.parametrize("told", ['{"schema": 1}', '{"schema": 1, "mode": "order", "fallbacks": "many"}'])
def test_a_file_that_is_nonsense_ends_the_figures_and_not_the_server(config: Any, told: str) -> None:
    logger = gauges.Gauges(config)
    file().parent.mkdir(parents=True)
    file().write_text(told)
    logger.record(None, None)
    assert not logger._ours


def test_of_several_processes_that_serve_http_one_counts(config: Any) -> None:
    before = REGISTRY.get_sample_value("laps_sd_plans_total", LABELS) or 0.0
    for rank in (0, 1):
        config.parallel_config._api_process_rank = rank
        status.Status("order", "gittins", plans=7).write(file())
        gauges.Gauges(config).log()
    assert REGISTRY.get_sample_value("laps_sd_plans_total", LABELS) == before + 7


def test_a_server_without_laps_sd_shows_none(config: Any) -> None:
    config.scheduler_config.scheduler_cls = None
    assert not gauges.Gauges(config)._ours
