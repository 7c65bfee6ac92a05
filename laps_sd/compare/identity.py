"""What a comparison was made on: the code that served, the machine, the versions. Measures nothing."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from scheduler_service.sim.journal import code_digest

_ROOT = Path(__file__).parents[2]
_SERVING = ("protos", "gateway", "scheduler_service", "worker_service", "laps_sd/loadtest")
_ASIDE = ("scheduler_service/sim", "worker_service/bench", "worker_service/distill")
_SUFFIXES = (".py", ".lua", ".h", ".cpp", ".safetensors")
_PACKAGES = ("laps-sd", "torch", "transformers", "grpcio", "redis")


def serving_code() -> str:
    """A digest of the code that the figures of a run depend on. The simulator and the reports are left out."""
    files = [file for package in _SERVING for file in (_ROOT / package).rglob("*") if file.suffix in _SUFFIXES]
    aside = [_ROOT / package for package in _ASIDE]
    return code_digest(file for file in files if not any(map(file.is_relative_to, aside)))[:16]


def machine() -> dict[str, Any]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {"processor": next(names, platform.machine()), "cores": os.cpu_count()}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
