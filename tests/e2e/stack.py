"""`laps-sd up` as a user starts it, in a process of its own, and the processes it starts."""

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

READY_S = 200.0  # also where the kernels are compiled first
STOP_S = 60.0


@dataclass
class Stack:
    process: asyncio.subprocess.Process
    grpc: str
    http: str
    scheduler: str

    def child(self, module: str, *, having: str = "") -> psutil.Process:
        """The first child that runs this module, for example `worker_service`; `having`: a word of its command line."""
        for child in self.running(module):
            if not having or having in child.cmdline():
                return child
        raise LookupError(f"no child runs {module}")

    def running(self, module: str) -> list[psutil.Process]:
        """The children that run this module; not those that do so on another's leash."""
        return [child for child in self.children() if child.cmdline()[1:4] == ["-P", "-m", module]]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    async def stop(self) -> int:
        """SIGTERM, then its exit status."""
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_S):
            return await self.process.wait()


@asynccontextmanager
async def running_stack(
    model: Path | str, folder: Path, *flags: str, device: str | None = "cpu", ready_s: float = READY_S
) -> AsyncIterator[Stack]:
    """Ready when yielded: a warmed worker serves. Its logs are in `folder`/up.log. `device`: None: whichever its engine
    takes."""
    command = ["up", "--model", str(model), "--dtype", "float32", "--grpc-port", "0", "--http-port"]
    with (folder / "up.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "laps_sd",
            *command,
            "0",
            *flags,
            *(["--device", device] if device else []),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(ready_s):
                line = (await process.stdout.readline()).decode()
            match = re.fullmatch(r"ready grpc=(\S+) http=(\S+) scheduler=(\S+)\n", line)
            assert match, f"not ready, but {line!r}; {(folder / 'up.log').read_text()[-3000:]}"
            yield Stack(process, match[1], match[2], match[3])
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
