"""The directory of a model that somebody named: the worker's own program finds it, and fetches it if need be."""

import asyncio
import signal
import sys
from pathlib import Path

from laps_sd.ports import StackError
from laps_sd.supervise import BAD_SETTINGS, end, leashed

PULL_END_S = 5.0  # what `pull` may take to put its files in order once it is interrupted


class NoModel(StackError):
    """The model cannot be had. There is no message: `laps-sd pull` has said why, on stderr. `hopeless`: nor later."""

    def __init__(self, *, hopeless: bool) -> None:
        super().__init__()
        self.hopeless = hopeless


async def find_model(model: str) -> Path:
    """The model's directory. The worker's module `pull` fetches the model if it is not there. Raises StackError."""
    process = await asyncio.create_subprocess_exec(
        *leashed([sys.executable, "-P", "-m", "laps_sd.interrupt", "worker_service.pull", model]),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            await end(process, PULL_END_S, signal.SIGINT)  # so that nothing half-made stays in the cache
    if process.returncode in (1, BAD_SETTINGS):
        raise NoModel(hopeless=process.returncode == BAD_SETTINGS)
    if process.returncode:
        raise StackError("no model, no service")
    return Path(output.decode().strip())
