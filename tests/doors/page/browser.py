"""Runs a program in Node that drives a real Chromium, and returns what it saw. No assertions live here."""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FOLDER = Path("build/browser").absolute()
PUPPETEER = "puppeteer-core@24"
INSTALL_S = 300
VISIT_S = 800  # on a busy machine; an idle one takes a quarter of that


def programs() -> dict[str, str]:
    """Where Chromium and its driver are, for the programs. The driver is fetched once from npm. Raises LookupError
    where there is no browser or no index, RuntimeError if the index has not what is wanted."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None or shutil.which("node") is None:
        raise LookupError("chromium and node are not installed (Debian: apt install chromium nodejs npm)")
    driver = FOLDER / "node_modules" / "puppeteer-core"
    if not driver.exists():
        install = ["npm", "install", "--silent", "--no-save", "--prefix", str(FOLDER), PUPPETEER]
        try:
            done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LookupError(f"no npm index gave {PUPPETEER}: {error}") from error
        if done.returncode:
            if _index_answers():
                raise RuntimeError(f"{PUPPETEER} cannot be installed: {done.stderr.strip()[-2000:]}")
            raise LookupError("no npm index answers")
    return {"CHROMIUM": chromium, "PUPPETEER": str(driver)}


def _index_answers() -> bool:
    """Asked for a package that is always there."""
    asked = subprocess.run(["npm", "view", "npm", "name"], capture_output=True, timeout=INSTALL_S, check=False)
    return asked.returncode == 0


async def visit(program: str, *arguments: str) -> dict[str, Any]:
    """What the program `program`.mjs saw. Skips the test where there is no browser."""
    try:
        where = await asyncio.to_thread(programs)
    except LookupError as missing:
        pytest.skip(str(missing))
    return await run(program, *arguments, where=where)


async def run(program: str, *arguments: str, where: dict[str, str]) -> dict[str, Any]:
    """Raises RuntimeError if the program fails."""
    process = await asyncio.create_subprocess_exec(
        "node",
        str(HERE / f"{program}.mjs"),
        *arguments,
        env={**os.environ, **where},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        said, complained = await asyncio.wait_for(process.communicate(), VISIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(complained.decode()[-3000:])
    seen: dict[str, Any] = json.loads(said)
    return seen
