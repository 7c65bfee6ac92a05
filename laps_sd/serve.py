"""A stack that runs until it has done its work or a signal comes, and what its failures say. Which processes a stack
has, and their order, is in stack.py."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import typer

from laps_sd.client import NotServing
from laps_sd.options import Options
from laps_sd.ports import StackError
from laps_sd.redis_server import NoServer
from laps_sd.stack import Emit, Stack, run, to_stderr
from laps_sd.supervise import BAD_SETTINGS, GaveUp
from protos.serving import stop_signals


def run_stack(options: Options, use: Callable[[Stack], Awaitable[None]], emit: Emit = to_stderr) -> bool:
    """Starts the stack, runs `use` until it returns or a signal comes, stops the stack. Returns False after a signal.

    Failures of the stack are printed to stderr. Raises typer.Exit after them: 2 where starting again is of no use.
    """
    return run_to_end(run(options, use, emit))


def run_to_end(work: Coroutine[Any, Any, None]) -> bool:
    """As run_stack, of any work with processes."""
    finished, code = False, 0
    try:
        finished = asyncio.run(_until_signal(work))
    except* (StackError, NoServer, GaveUp, NotServing, OSError) as failures:
        for failure in failures.exceptions:
            if words := str(failure):
                typer.echo(f"laps-sd: {words}", err=True)
            code = max(code, BAD_SETTINGS if getattr(failure, "hopeless", False) else 1)
    if code:
        raise typer.Exit(code)
    return finished


async def _until_signal(work: Coroutine[Any, Any, None]) -> bool:
    """The first signal cancels `work`, which then ends in good order; a second signal cuts that short.

    Returns whether `work` ended by itself.
    """
    task = asyncio.create_task(work)
    async with stop_signals() as stopping:
        while not task.done():
            signalled = asyncio.create_task(stopping.wait())
            await asyncio.wait((task, signalled), return_when=asyncio.FIRST_COMPLETED)
            signalled.cancel()
            if stopping.is_set():
                stopping.clear()
                task.cancel()
    if task.cancelled():
        return False
    task.result()
    return True
