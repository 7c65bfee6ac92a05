"""An event loop on virtual time, and processes that share it: each can be killed, frozen and thawed between any two
steps of its tasks. No service and no fault is known here."""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context, ContextVar, copy_context
from typing import Any


class Standstill(Exception):
    """Nobody will ever do anything again."""


class Process:
    """Tasks and timers that live and die together. Whatever runs in its `context`, and all that this starts, is its."""

    def __init__(self, name: str, loop: "VirtualLoop") -> None:
        self.name, self.loop = name, loop
        self.alive, self.frozen = True, False
        self.skew_s = 0.0  # of its clock on the wall
        self.stopping = asyncio.Event()  # it was sent SIGTERM
        self.context = copy_context()
        self.context.run(PROCESS.set, self)
        self._stash: list[asyncio.Handle] = []
        loop.processes.append(self)
        self._steps = 0
        self._action: Callable[[], None] | None = None

    def start(self, main: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        return self.loop.create_task(main, context=self.context.copy())

    def kill(self) -> None:
        """Nothing of it runs any more: no `except`, no `finally`."""
        self.alive = False

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        """All that became due meanwhile is done now."""
        self.frozen = False
        self.loop._ready.extend(self._stash)
        self._stash.clear()

    def after(self, steps: int, action: Callable[[], None]) -> None:
        """Have it done when so many further steps of its tasks have run: between two awaits, wherever they are."""
        self._steps, self._action = steps, action

    def runs(self, handle: asyncio.Handle) -> bool:
        """Whether this step of it is to be done now."""
        if self._action is not None:
            self._steps -= 1
            if self._steps < 0:
                action, self._action = self._action, None
                action()
        if self.alive and not self.frozen:
            return True
        self._stash.append(handle)  # of a dead one until all is wound up
        return False


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class Numbered(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address: equal seeds give equal runs."""

    _numbers = itertools.count()

    def __init__(self, coro: Any, *, loop: "VirtualLoop", context: Context | None) -> None:
        self._number = next(self._numbers)
        super().__init__(coro, loop=loop, context=context)
        self.process = PROCESS.get() if context is None else context.get(PROCESS)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """No real time passes: while nothing is ready, the clock goes on to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.steps = 0
        self.over = False  # the dead and the frozen run as well, to be wound up
        self.processes: list[Process] = []
        self.tasks: list[Numbered] = []
        self.failures: list[str] = []  # what nobody caught
        self.neutral = Context()  # of no process: the network, the store, the hand that injects faults
        Numbered._numbers = itertools.count()
        self.set_task_factory(self._new_task)
        self.set_exception_handler(self._failed)

    def time(self) -> float:
        return self.now

    def at(self, when: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """In no process."""
        return self.call_at(when, callback, *args, context=self.neutral)

    def _new_task(self, loop: asyncio.AbstractEventLoop, coro: Any, context: Context | None = None) -> Any:
        task = Numbered(coro, loop=loop, context=context)
        self.tasks.append(task)
        return task

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _run_once(self) -> None:
        ready = self._ready
        if not ready:
            self._advance()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is None or self.over or process.runs(handle):
                self.steps += 1
                handle._run()

    def _advance(self) -> None:
        timers = self._scheduled
        while timers:
            handle = heapq.heappop(timers)
            handle._scheduled = False
            if not handle._cancelled:
                self.now = max(self.now, handle._when)
                self._ready.append(handle)
                return
        raise Standstill

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        future = self.create_future()
        future.set_result(func(*args))
        return future

    def _write_to_self(self) -> None:
        """There is no other thread to wake it from."""

    def wind_up(self) -> None:
        """The end: every task is cancelled, and what nobody looked at is told in `failures`."""
        for task in self.tasks:
            unseen = task.done() and not task.cancelled() and task._log_traceback
            if unseen and (task.process is None or task.process.alive):
                self.failures.append(f"nobody looked at the end of {task.get_coro()}: {task.exception()!r}")
        self.over = True
        self.set_exception_handler(lambda loop, context: None)
        for process in self.processes:
            process.thaw()
        for _ in range(100):
            left = [task for task in self.tasks if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            self._run_for_a_while()
        self.tasks.clear()
        self._ready.clear()
        self._scheduled.clear()
        self.close()

    def _run_for_a_while(self) -> None:
        self.call_soon(self.stop)
        self.run_forever()
