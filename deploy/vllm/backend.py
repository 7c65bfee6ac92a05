"""The build backend of the distribution for vLLM: setuptools', run on sources that are gathered from the repository.

`gathered` gets the package `laps_sd_vllm`, and in `laps_sd_vllm._core` what of the scheduler and of the worker it uses:
the core, the predictor, the simulator and the model of costs. So no other top-level name of ours enters the environment
of vLLM. An sdist holds `gathered`, and is built without the repository.
"""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools.build_meta import (
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_wheel",
]

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
GATHERED = HERE / "gathered"
SIMULATOR = ("__init__", "costs", "fields", "oracle", "results", "side_by_side", "simulator", "worker", "workload")
OWN = ("laps_sd_vllm/*.py", "laps_sd_vllm/py.typed")
CORE = (
    "scheduler_service/__init__.py",
    "scheduler_service/learned.py",
    "scheduler_service/core/**/*.py",
    "scheduler_service/predictor/*.py",
    *(f"scheduler_service/sim/{name}.py" for name in SIMULATOR),
    "worker_service/__init__.py",
    "worker_service/engine/__init__.py",
    "worker_service/engine/cost_model.py",
    "worker_service/engine/types.py",
)
_IMPORT = re.compile(r"^(\s*(?:from|import) )(?=(?:scheduler_service|worker_service)\b)", re.MULTILINE)


def gather() -> None:
    """Makes `gathered` anew; in an unpacked sdist it is there already."""
    if not (REPOSITORY / "scheduler_service" / "core").is_dir():
        return
    shutil.rmtree(GATHERED, ignore_errors=True)
    for pattern, below in [*((each, "") for each in OWN), *((each, "laps_sd_vllm/_core") for each in CORE)]:
        for file in sorted(REPOSITORY.glob(pattern)):
            copy = GATHERED / below / file.relative_to(REPOSITORY)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(_IMPORT.sub(r"\1laps_sd_vllm._core.", file.read_text(encoding="utf-8")), encoding="utf-8")
    (GATHERED / "laps_sd_vllm" / "_core" / "__init__.py").write_text('"""Parts of LAPS-SD that the plug-in uses."""\n')
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (GATHERED / "VERSION").write_text(project["version"] + "\n")
    shutil.copy(REPOSITORY / "LICENSE", GATHERED)


gather()  # each hook runs in a process of its own, and each needs the sources
