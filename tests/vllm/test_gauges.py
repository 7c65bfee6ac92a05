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
        scheduler_config=SimpleNamespace(scheduler_cls=gauges.ORDERS),
        instance_id="x",
        model_config=SimpleNamespace(served_model_name="m", model="m"),
    )


def file() -> Path:
    return status.file_of(status.folder(Path(envs.VLLM_CACHE_ROOT)), "x", 0)


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
    logger = gauges.Gauges(config)
    logger.log()
    file().parent.mkdir(parents=True)
    file().write_text('{"schema": 99}')
    logger.log()
