"""Ends the process when the model's thread does not come back: a device that hangs cannot be asked to stop.

Its requests continue elsewhere, and whoever supervises the worker starts it anew. No RPC here, and no tensors.
"""

import asyncio
import faulthandler
import os
import sys
from typing import TYPE_CHECKING, NoReturn

import structlog

if TYPE_CHECKING:
    from worker_service.runner import Runner, Task

POLL_S = 0.2
SLACK = 10.0  # times what a task is expected to take, beside the time that any may
DEAF = 2.0  # times the longest that a task may take: then the event loop does not run any more, either


class Watchdog:
    """`step_timeout_s`, `warm_up_timeout_s`: how much longer than expected a step, and how long warm-up, may take."""

    def __init__(self, runner: "Runner", step_timeout_s: float, warm_up_timeout_s: float) -> None:
        self._runner = runner
        self._step_timeout_s, self._warm_up_timeout_s = step_timeout_s, warm_up_timeout_s

    async def run(self) -> NoReturn:
        """Until cancelled, or the end of the process.

        Time is counted in polls of our own: a worker that was stopped for a while (SIGSTOP, a suspended machine) is
        not one that hangs. What keeps the interpreter itself, and so these polls, is left to faulthandler's timer.
        """
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
                os._exit(1)  # its thread would keep any other end from ending

    def _limit_s(self, task: "Task | None") -> float:
        if task is not None and task.expected_s is None:
            return self._warm_up_timeout_s
        return self._step_timeout_s + SLACK * (task.expected_s or 0.0 if task else 0.0)
