"""Fits models in a process of their own: fitting takes seconds, and holds the interpreter's lock. Learns nothing."""

import asyncio
import sys

from scheduler_service.predictor.frames import HEAD, framed
from scheduler_service.predictor.model import Model
from scheduler_service.predictor.window import UNREADABLE, Snapshot, Window, pack, unpack

COMMAND = (sys.executable, "-m", "scheduler_service.predictor")
DEADLINE_S = 60.0  # for one fit, the start of the process included


class TrainingFailed(Exception):
    """The process died, did not answer in time or answered nonsense. The next fit gets a new one."""


class Trainer:
    """One process, started when first needed. It ends when its stdin does, so it cannot outlive this one by more than
    the fit at hand."""

    def __init__(self, command: tuple[str, ...] = COMMAND, deadline_s: float = DEADLINE_S) -> None:
        self._command, self._deadline_s = command, deadline_s
        self._process: asyncio.subprocess.Process | None = None

    async def fit(self, snapshot: Snapshot) -> Model:
        """Raises TrainingFailed. One at a time."""
        try:
            async with asyncio.timeout(self._deadline_s):
                payload = await asyncio.to_thread(lambda: pack(Window.of(snapshot).arrays()))
                fitted = await self._exchange(payload)
                return await asyncio.to_thread(lambda: Model.of_arrays(unpack(fitted)))
        except (*UNREADABLE, OSError, EOFError) as error:  # a timeout is an OSError; an answer cut short an EOFError
            await self.close()
            raise TrainingFailed(str(error) or type(error).__name__) from error

    async def _exchange(self, payload: bytes) -> bytes:
        if self._process is None or self._process.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            # In a session of its own: Ctrl-C in a terminal is the scheduler's to act on.
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, start_new_session=True
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(framed(payload))
        await stdin.drain()
        (size,) = HEAD.unpack(await stdout.readexactly(HEAD.size))
        return await stdout.readexactly(size)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
