"""Wheels of this repository, built as `make wheels` builds them, and empty environments to install them into.
No assertions live here."""

import functools
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
INSTALL_S = 900  # mostly the packages that the service needs
ASK_S = 120


def run(*command: str | Path, folder: Path | None = None, timeout_s: float = ASK_S) -> subprocess.CompletedProcess[str]:
    """With nothing of this checkout on its module path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LAPS_SD"))}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, env=environment)


@functools.cache
def index_answers() -> bool:
    wanted = ["install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "typing-extensions"]
    return run(sys.executable, "-m", "pip", *wanted).returncode == 0


def build(project: Path, out: Path) -> Path:
    """The wheel, built from its sdist."""
    if not index_answers():
        pytest.skip("no package index answers: setuptools cannot be fetched")
    built = run(sys.executable, "-m", "build", "--outdir", out, project, timeout_s=INSTALL_S)
    assert built.returncode == 0, built.stderr[-2000:]
    (wheel,) = out.glob("*.whl")
    return wheel


def environment(folder: Path, wheel: Path) -> Path:
    """The folder of programs of a new environment with the wheel, and what it needs."""
    venv.create(folder, with_pip=True)
    install(folder / "bin", wheel)
    return folder / "bin"


def install(programs: Path, *what: str | Path) -> None:
    installed = run(programs / "python", "-m", "pip", "install", "--quiet", *what, timeout_s=INSTALL_S)
    assert installed.returncode == 0, installed.stderr[-2000:]
