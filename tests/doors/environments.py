"""Virtual environments of clients that do not resolve beside our own packages: made once, kept under build/doors. A
test that needs one is skipped where no package index answers. No assertions live here."""

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.doors.wheels import index_answers

FOLDER = Path("build/doors").absolute()
INSTALL_S = 600


def python_with(*requirements: str) -> str:
    """The interpreter of an environment that has these, and nothing of ours."""
    name = hashlib.blake2b("\n".join([sys.version, *requirements]).encode(), digest_size=8).hexdigest()
    folder = FOLDER / name
    python, made = folder / "bin" / "python", folder / "made"
    if not made.exists():
        venv.create(folder, clear=True, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
        try:
            done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"no package index gave {', '.join(requirements)} within {INSTALL_S} s")
        if done.returncode:
            if not index_answers():
                pytest.skip("no package index answers")
            raise RuntimeError(f"{', '.join(requirements)} cannot be installed: {done.stderr.strip()[-2000:]}")
        made.touch()
    return str(python)
