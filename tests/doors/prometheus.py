"""A real Prometheus: the one on the PATH, else Debian's package, unpacked in a cache and not installed."""

import asyncio
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from platformdirs import user_cache_path

from laps_sd.ports import claim_ports
from tests.waiting import WAIT_S, until

FETCH_S = 300.0


def binary() -> Path:
    """Skips the test where there is none."""
    if (found := shutil.which("prometheus")) is not None:
        return Path(found)
    cached = user_cache_path("laps-sd") / "prometheus"
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        try:
            _fetch(cached)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no Prometheus here, and Debian's package cannot be had: {error}")
    return cached


def _fetch(to: Path) -> None:
    """Raises OSError, SubprocessError."""
    with tempfile.TemporaryDirectory() as folder:
        quiet: dict[str, Any] = {"cwd": folder, "check": True, "timeout": FETCH_S, "capture_output": True}
        subprocess.run(["apt-get", "download", "prometheus"], **quiet)
        (package,) = Path(folder).glob("prometheus_*.deb")
        subprocess.run(["dpkg", "-x", package.name, "unpacked"], **quiet)
        shutil.copy(Path(folder, "unpacked/usr/bin/prometheus"), draft := to.with_name("prometheus.tmp"))
        draft.replace(to)


class Prometheus:
    def __init__(self, at: str) -> None:
        self._client = httpx2.AsyncClient(base_url=f"http://{at}", timeout=WAIT_S)

    async def ready(self) -> bool:
        try:
            return (await self._client.get("/-/ready")).status_code == 200
        except httpx2.TransportError:
            return False

    async def query(self, expression: str) -> list[Any]:
        """The series of an expression, as they are now. Fails the test if Prometheus refuses it."""
        return await self._ask("/api/v1/query", query=expression)

    async def query_range(self, expression: str, start: float, end: float) -> list[Any]:
        """The same, a value a second from `start` to `end`, seconds since the Unix epoch."""
        return await self._ask("/api/v1/query_range", query=expression, start=start, end=end, step=1)

    async def _ask(self, path: str, **parameters: str | float) -> list[Any]:
        answer = json.loads((await self._client.get(path, params=parameters)).content)
        assert answer["status"] == "success", f"{parameters['query']}: {answer.get('error')}"
        return list(answer["data"]["result"])


@asynccontextmanager
async def prometheus(config: Path) -> AsyncIterator[Prometheus]:
    """One that runs with this configuration. Its data and its log are beside it."""
    program, (port,) = binary(), claim_ports(0)
    with (config.parent / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={config.parent / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            stderr=log,
        )
        try:
            served = Prometheus(f"127.0.0.1:{port}")
            await until(served.ready)
            yield served
        finally:
            process.terminate()
            await process.wait()
