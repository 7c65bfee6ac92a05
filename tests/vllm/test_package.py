"""The distribution for vLLM's environment: what it brings along, and what it leaves as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

PROJECT = Path(__file__).parents[2] / "deploy" / "vllm"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
WAIT_S = 1700  # torch takes long to load on a busy machine


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LAPS_SD"))}
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=kept | environment)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = run(*PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, PROJECT)
    if built.returncode and "No matching distribution" in built.stderr:
        pytest.skip("no package index answers: setuptools cannot be fetched")
    assert built.returncode == 0, built.stderr[-2000:]
    (wheel,) = folder.glob("laps_sd_vllm-*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    done = run(*PIP, "install", "--quiet", "--no-deps", "--target", folder, wheel)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def test_it_brings_one_name_of_ours(installed: Path) -> None:
    names = {each.name for each in installed.iterdir() if not each.name.endswith(".dist-info")}
    assert names == {"laps_sd_vllm"}


def test_beside_vllm_it_changes_no_version(wheel: Path, tmp_path: Path) -> None:
    """With what the predictor needs, too: all that pip would install is new there."""
    report = tmp_path / "report.json"
    done = run(*PIP, "install", "--quiet", "--dry-run", "--report", report, f"{wheel}[predictor]")
    assert done.returncode == 0, done.stderr[-2000:]
    there = {each["name"].lower() for each in json.loads(run(*PIP, "list", "--format=json").stdout)}
    new = {each["metadata"]["name"].lower() for each in json.loads(report.read_text())["install"]}
    assert "laps-sd-vllm" in new
    assert new & there <= {"laps-sd-vllm"}


def test_it_works_without_the_repository(installed: Path, tmp_path: Path) -> None:
    said = (
        "import sys, laps_sd_vllm; from laps_sd_vllm import plugin, gauges, background, side_by_side; "
        "from laps_sd_vllm._core.scheduler_service.sim.side_by_side import QUESTION; "
        "assert laps_sd_vllm.LapsSdScheduler is plugin.LapsSdScheduler; "
        "ours = {name.partition('.')[0] for name in sys.modules}; "
        "assert not ours & {'scheduler_service', 'worker_service', 'protos', 'laps_sd'}, ours; "
        "print(background.FIT)"
    )
    asked = run(sys.executable, "-P", "-c", said, PYTHONPATH=str(installed))
    assert asked.returncode == 0, asked.stderr[-2000:]
    assert asked.stdout.split()[-1] == "laps_sd_vllm._core.scheduler_service.predictor"


def test_vllm_finds_its_gauges(installed: Path) -> None:
    said = (
        "from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories as load; "
        "print([each.__module__ for each in load()])"
    )
    asked = run(sys.executable, "-P", "-c", said, PYTHONPATH=str(installed))
    assert "['laps_sd_vllm.gauges']" in asked.stdout, asked.stderr[-2000:]
