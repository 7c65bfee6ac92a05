"""What served a comparison: code, weights, libraries. Measures nothing."""

import sys
from pathlib import Path

from laps_sd.machine import versions
from scheduler_service.core.policies import POLICIES, find_policy
from scheduler_service.sim.journal import code_digest
from scheduler_service.sim.oracle import parts
from worker_service.identity import fingerprint
from worker_service.pull import resolve

_ROOT = Path(__file__).parents[2]
_SERVING = (
    *("protos", "gateway", "scheduler_service", "worker_service", "laps_sd/loadtest", "laps_sd/client"),
    *(f"laps_sd/{name}.py" for name in ("stack", "serve", "options")),
    *(f"laps_sd/compare/{name}.py" for name in ("live", "work", "design", "host", "pace")),
)
_ASIDE = ("scheduler_service/sim", "worker_service/bench", "worker_service/distill")
_SUFFIXES = (".py", ".lua", ".h", ".cpp", ".safetensors")


def serving_code(root: Path = _ROOT) -> str:
    """A digest of the code that the figures of a run depend on. The simulator and the reports are left out."""
    every = (file for name in _SERVING for file in (root / name, *(root / name).rglob("*")))
    aside = [root / package for package in _ASIDE]
    return code_digest(file for file in every if file.suffix in _SUFFIXES and not any(map(file.is_relative_to, aside)))[
        :16
    ]


def made_with(model: str, drafter: str) -> dict[str, str]:
    """The model, the drafter and the libraries by which a run was made: its figures depend on them beside the code.
    The model is fetched if need be; the files of a drafter count where it is a folder (an absolute path). Raises
    ModelError."""
    drafts = fingerprint(Path(drafter)) if Path(drafter).is_absolute() else drafter
    return {"model": fingerprint(resolve(model)), "drafter": drafts} | versions()


def policy_code(policy: str) -> str:
    """A digest of the files of a policy's classes; "" for ours. Raises ValueError if it cannot be imported."""
    name, _ = parts(policy)
    if name in POLICIES:
        return ""
    named = (getattr(sys.modules[kind.__module__], "__file__", None) for kind in find_policy(name).__mro__)
    files = {Path(file) for file in named if file}
    return code_digest(file for file in files if not file.is_relative_to(_ROOT / "scheduler_service"))[:16]
