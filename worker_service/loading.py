"""Loads a model beside the event loop. A process that is told to end does not wait for a load: nothing is lost by that.
How a model is loaded is not known here."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

_NAME = "loading"


async def beside(load: Callable[..., T], *arguments: Any) -> T:
    """As asyncio.to_thread, but in a thread that the end of the loop does not wait for."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[T] = loop.create_future()

    def deliver(tell: Callable[[Any], None], what: object) -> None:
        if not loaded.done():
            tell(what)

    def run() -> None:
        tell: Callable[[Any], None] = loaded.set_result
        try:
            what: object = load(*arguments)
        except BaseException as error:
            tell, what = loaded.set_exception, error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, tell, what)

    threading.Thread(target=run, name=_NAME, daemon=True).start()
    return await loaded


def leave(code: int) -> NoReturn:
    """End the process. While a load is still under way it ends without Python's own clean-up, which would take away
    what the load's thread still uses."""
    if any(thread.name == _NAME for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
