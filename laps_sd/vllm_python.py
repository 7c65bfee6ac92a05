"""The environment that vLLM is installed in, for `laps-sd up --engine vllm`: whether a worker can run there, and what
of ours it gets to import. Nothing of vLLM runs in this process."""

import json
import subprocess
import tempfile
from difflib import get_close_matches
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from laps_sd import vllm_probe
from laps_sd_vllm.versions import SUPPORTED, supported

MODULE = "worker_service.vllm_engine"
PACKAGES = ("laps_sd_vllm", "protos", "worker_service")  # what a worker imports of ours
# Packages that those import, as the project's own metadata requires it.
NEEDS = (
    "annotated-types",
    "googleapis-common-protos",
    "grpcio",
    "grpcio-health-checking",
    "grpcio-reflection",
    "grpcio-status",
    "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry-sdk",
    "platformdirs",
    "prometheus-client",
    "protobuf",
    "pydantic-settings",
    "starlette",
    "structlog",
    "tokenizers",
    "uvicorn",
)
_PROBE_S = 60.0  # a cold disk


class UnusableError(Exception):
    """A worker cannot run there, or not with these arguments; the message is a sentence that says what to do."""


def requirements() -> list[str]:
    """The packages to install beside vLLM, with the versions that this project asks for."""
    told = (text.partition(";")[0].strip() for text in metadata.requires("laps-sd") or [])
    return [text for text in told if text.startswith(NEEDS) and _name(text) in NEEDS]


def _name(requirement: str) -> str:
    return requirement[: next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), None)]


def check(python: Path, vllm_args: str | None) -> None:
    """Raises UnusableError. It takes a second or two."""
    told = _probe(python)
    version = told["vllm"]
    if version is None:
        raise UnusableError(f"{python} has no vLLM")
    if not supported(version):
        raise UnusableError(f"{python} has vLLM {version}; this version of LAPS-SD works with {SUPPORTED}")
    if told["lacks"]:
        words = " ".join(f"'{each}'" for each in told["lacks"])
        raise UnusableError(f"{python} lacks what a worker needs beside vLLM: run `{python} -m pip install {words}`")
    names = told["arguments"]
    if strange := [name for name in json.loads(vllm_args or "{}") if name not in names]:
        near = get_close_matches(strange[0], names, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnusableArgsError(f"EngineArgs of vLLM {version} has no {strange[0]!r}{hint}")


class UnusableArgsError(UnusableError):
    """As UnusableError, of the arguments."""


def _probe(python: Path) -> dict[str, Any]:
    try:
        asking = [str(python.expanduser().absolute()), "-P", vllm_probe.__file__, *requirements()]
        done = subprocess.run(asking, capture_output=True, timeout=_PROBE_S, stdin=subprocess.DEVNULL, check=True)
        told: dict[str, Any] = json.loads(done.stdout)
    except OSError as error:
        raise UnusableError(f"{python} cannot be run: {error.strerror}") from None
    except RuntimeError as error:  # of ~, for nobody's home
        raise UnusableError(f"{python}: {error}") from None
    except (subprocess.SubprocessError, ValueError):
        raise UnusableError(f"{python} is no Python interpreter of version 3.11 or later") from None
    return told


def command(python: Path | None) -> list[str]:
    """A worker with vLLM, as far as its flags. An environment's interpreter is a link whose own path tells which
    environment it is, so the path is not resolved."""
    assert python is not None  # checks.py has seen to it
    return [str(python.expanduser().absolute()), "-P", "-m", MODULE]


def environment(vllm_args: str | None) -> dict[str, str]:
    """vLLM's arguments, which may hold a secret, and where the worker finds our packages."""
    return {"LAPS_SD_WORKER_VLLM_ARGS": vllm_args or "{}", "PYTHONPATH": _imports().name}


@cache
def _imports() -> "tempfile.TemporaryDirectory[str]":
    """A folder with links to our packages and to nothing else, as long as this process lives: the folder in which they
    are installed may hold another torch than vLLM's."""
    imports = tempfile.TemporaryDirectory(prefix="laps-sd-imports-")
    for name in PACKAGES:
        found = find_spec(name)
        assert found is not None
        assert found.origin is not None
        (Path(imports.name) / name).symlink_to(Path(found.origin).parent, target_is_directory=True)
    return imports
