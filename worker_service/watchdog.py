"""Ends the process when the model's thread does not come back: a device that hangs cannot be asked to stop.

The worker's requests then go on elsewhere, and its supervisor starts it anew. No RPC here, and no tensors.
"""

import asyncio
import faulthandler
import os
import sys
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn, Protocol

import structlog

POLL_S = 0.2
SLACK = 10.0  # times what a task is expected to take, beside the time that any task may take
DEAF = 2.0  # times that limit: then faulthandler ends the process, since the event loop, which should, does not run


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What the model's thread is doing, and in how many seconds it should be done; None: it warms up, nobody knows."""

    expected_s: float | None


class Watched(Protocol):
    """The runner, as far as it is watched."""

    task: Task | None  # None: it waits


class Thread(Watched, Protocol):
    """The runner, as far as it is started and stopped."""

    ended: Future[None]

    def start(self) -> None: ...

    def stop(self) -> None: ...


@asynccontextmanager
async def running(
    runner: Thread, step_timeout_s: float, warm_up_timeout_s: float
) -> "AsyncIterator[asyncio.Future[None]]":
    """Start the thread of `runner`; at the end stop it, and return once it has ended. It is watched until then, for its
    last task may hang, too. Yields its end. The times are those of Watchdog."""
    runner.start()
    ended = asyncio.wrap_future(runner.ended)
    watching = asyncio.create_task(Watchdog(runner, step_timeout_s, warm_up_timeout_s).run())
    cancelled: asyncio.CancelledError | None = None
    try:
        yield ended
    finally:
        runner.stop()
        while not ended.done():
            try:
                await asyncio.wait([ended])
            except asyncio.CancelledError as error:  # first_of cancels again and again
                cancelled = error
        watching.cancel()
        ended.exception()  # else asyncio complains that nobody has asked for it
        if cancelled is not None:
            raise cancelled


class Watchdog:
    """Watches over the tasks of one runner."""

    def __init__(self, runner: Watched, step_timeout_s: float, warm_up_timeout_s: float) -> None:
        """How much longer than expected a step may take, and how long the warm-up may take; seconds."""
        self._runner = runner
        self._step_timeout_s, self._warm_up_timeout_s = step_timeout_s, warm_up_timeout_s

    async def run(self) -> NoReturn:
        """Until cancelled, or the end of the process.

        Time is counted in our own polls, for a worker that was stopped for a while (SIGSTOP, a suspended machine) does
        not hang. If the interpreter itself is blocked, so that nothing polls, faulthandler's timer ends the process.
        """
        try:
            await self._watch()
        except Exception as error:  # nobody waits for this coroutine, and nothing would be watched any more
            structlog.get_logger().error("cannot_watch", reason=repr(error))
            os._exit(1)
        finally:  # else its timer would end the process long after nobody is watched any more
            faulthandler.cancel_dump_traceback_later()

    async def _watch(self) -> NoReturn:
        task, age_s = self._runner.task, 0.0
        while True:
            limit_s = self._limit_s(task)
            faulthandler.dump_traceback_later(DEAF * limit_s, exit=True)
            await asyncio.sleep(POLL_S)
            age_s = age_s + POLL_S if task is not None and task is self._runner.task else 0.0
            task = self._runner.task
            if age_s >= limit_s:
                structlog.get_logger().error("hung", after_s=round(age_s, 1), expected_s=task and task.expected_s)
                faulthandler.dump_traceback(sys.stderr)
                os._exit(1)  # an orderly end would wait for the thread

    def _limit_s(self, task: Task | None) -> float:
        if task is not None and task.expected_s is None:
            return self._warm_up_timeout_s
        return self._step_timeout_s + SLACK * (task.expected_s or 0.0 if task else 0.0)
