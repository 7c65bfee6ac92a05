"""Whether anything listens where a server is said to be, told in seconds: a client that waits out a pause of a service
would wait much longer for one that was never started. Nothing is asked of the server."""

import asyncio
import os

from laps_sd.client import NotServing
from laps_sd.client.causes import PROBE_S, find_cause
from laps_sd.client.server import find_server

LISTENS_S = 5.0  # a service that is being started again listens within this
_PAUSE_S = 0.2


async def listens(server: str, api_key: str | None, ca: str | os.PathLike[str] | None, within_s: float) -> None:
    """Returns once one of the server's addresses takes a connection. Raises NotServing after `within_s` seconds, and
    BadInput if these are no addresses."""
    found = find_server(server, api_key, ca)
    due = asyncio.get_running_loop().time() + within_s
    while True:
        for target in found.targets:
            if await _connects(target):
                return
        if asyncio.get_running_loop().time() + _PAUSE_S > due:
            cause = await asyncio.to_thread(find_cause, found, found.targets[0])
            raise NotServing(cause.words if cause is not None else f"{server} cannot be reached")
        await asyncio.sleep(_PAUSE_S)


async def _connects(target: str) -> bool:
    host, _, port = target.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError:  # a timeout is one
        return False
    writer.close()
    return True
