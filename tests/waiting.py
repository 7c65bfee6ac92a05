"""How long tests wait for what must come, and the one place where they poll: a condition in another process has no
event to wait for. No test measures time with these.
"""

import asyncio
from collections.abc import Awaitable, Callable

WAIT_S = 60.0  # Only a test that fails waits that long, so it may be far more than any machine needs.


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = WAIT_S) -> None:
    """Returns once the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.01)
