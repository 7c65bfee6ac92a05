"""`make gpu-check` works on a machine that has little, and keeps what it found. Its sections: test_on_a_gpu.py."""

import json
import subprocess
import sys
from pathlib import Path

from tests.gpu import report
from tests.gpu.__main__ import run
from tests.gpu.plan import Plan

_ROOT = Path(__file__).parents[2]
# Imports fail that such a machine may lack: all packages but four, and what these four need.
_BARE = """
import re, runpy, sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

def name(requirement):
    return re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace("_", "-").replace(".", "-")

there, todo = set(), ["torch", "transformers", "numpy", "safetensors"]
while todo:
    each = name(todo.pop())
    if each not in there:
        there.add(each)
        try:
            todo += [need for need in requires(each) or () if "extra ==" not in need]
        except PackageNotFoundError:
            pass
missing = {module for module, owners in packages_distributions().items() if not there & set(map(name, owners))}
missing -= {"tests", "protos", "gateway", "scheduler_service", "worker_service", "laps_sd"}

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, module, path=None, target=None):
        return None if module.split(".")[0] in missing else super().find_spec(module, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
assert "llguidance" in missing and "platformdirs" in missing
sys.argv[1:] = ["--section", "exactness", "--device", "cpu", "--size", "smallest", "--out", sys.argv[1]]
import tests.families.check
runpy.run_module("tests.gpu", run_name="__main__", alter_sys=False)
"""


def test_the_check_needs_torch_transformers_numpy_and_safetensors_alone(tmp_path: Path) -> None:
    words = [sys.executable, "-c", _BARE, str(tmp_path)]
    ended = subprocess.run(words, cwd=_ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["wrong"] == []
    assert found["done"]


def test_a_section_whose_time_is_over_loses_only_itself(tmp_path: Path) -> None:
    plans = [Plan("machine", seconds=0.3, least_s=0.1), Plan("bench", seconds=60, least_s=50)]
    assert run("cpu", "smallest", plans, tmp_path, seconds=1) == 1
    sections = json.loads((tmp_path / "gpu-check.json").read_text())["sections"]
    assert sections["machine"]["state"] == "was stopped: its time was over"
    assert sections["bench"]["state"] == "no time was left"
    assert "bench: no time was left" in (tmp_path / "gpu-check.txt").read_text()


def test_a_section_that_fails_says_why_and_the_next_one_runs(tmp_path: Path) -> None:
    plans = [Plan(name, seconds=100, least_s=0.1) for name in ("machine", "preemption")]
    assert run("no-such-device", "smallest", plans, tmp_path, seconds=200) == 1
    sections = json.loads((tmp_path / "gpu-check.json").read_text())["sections"]
    for name in ("machine", "preemption"):
        assert sections[name]["state"] == "failed with 1"
        assert "no-such-device" in sections[name]["log"]
        assert "no-such-device" in (tmp_path / f"{name}.log").read_text()


def test_the_table_of_what_a_section_left_unfinished_does_without_it() -> None:
    half = {"state": "failed with 1", "seconds": 3, "rows": [{"system": "ours", "batch": 1}]}
    rows = [{"drafter": "ngram", "dtype": "float32", "tokens_that_differ": 0.25}]
    found = {"size": "full", "asked_device": "cuda", "sections": {"bench": half, "exactness": {"drafters": rows}}}
    table = report.table(found)
    assert "bench: failed with 1 after 3 s" in table
    assert "no table of bench: KeyError" in table
    assert "25.00%" in table
