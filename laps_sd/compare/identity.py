"""The code that served a comparison, as a digest. Measures nothing."""

from pathlib import Path

from scheduler_service.sim.journal import code_digest

_ROOT = Path(__file__).parents[2]
_SERVING = ("protos", "gateway", "scheduler_service", "worker_service", "laps_sd/loadtest")
_ASIDE = ("scheduler_service/sim", "worker_service/bench", "worker_service/distill")
_SUFFIXES = (".py", ".lua", ".h", ".cpp", ".safetensors")


def serving_code() -> str:
    """A digest of the code that the figures of a run depend on. The simulator and the reports are left out."""
    files = [file for package in _SERVING for file in (_ROOT / package).rglob("*") if file.suffix in _SUFFIXES]
    aside = [_ROOT / package for package in _ASIDE]
    return code_digest(file for file in files if not any(map(file.is_relative_to, aside)))[:16]
