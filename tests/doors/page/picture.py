"""`make page-picture`: docs/live-page.png, the live page of a real stack under load. Needs chromium, node and npm."""

import asyncio
import sys
import tempfile
from pathlib import Path

from PIL import Image

from gateway.page.prompts import SAMPLES
from laps_sd.client import AsyncClient
from tests.doors.page.browser import programs, run
from tests.e2e.stack import running_stack

OUT = Path("docs/live-page.png")
USERS = 9  # each sends one sample prompt after the other, so that as many wait or run at any time
COLORS = 128  # of the palette: a quarter of the bytes, and nobody sees it


async def take(model: str) -> None:
    """Raises LookupError without a browser, RuntimeError if the page never showed everything."""
    where = programs()
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "page.png"
        async with running_stack(model, Path(folder), "--slots", "3") as stack, AsyncClient(stack.grpc) as client:
            users = [asyncio.create_task(_ask(client, first)) for first in range(USERS)]
            try:
                seen = await run("picture", f"http://{stack.http}/", str(picture), where=where)
            finally:
                for user in users:
                    user.cancel()
                await asyncio.gather(*users, return_exceptions=True)
        if not seen["full"]:
            raise RuntimeError("the page never showed running, paused and waiting requests and the policies at once")
        Image.open(picture).convert("RGB").quantize(COLORS).save(OUT, optimize=True)


async def _ask(client: AsyncClient, first: int) -> None:
    """One sample prompt after the other, for ever."""
    number = first
    while True:
        text, max_tokens = SAMPLES[number % len(SAMPLES)]
        async for _ in client.generate(
            messages=[{"role": "user", "content": text}], max_tokens=max_tokens, temperature=0.7, seed=number
        ):
            pass
        number += 5


if __name__ == "__main__":
    asyncio.run(take(sys.argv[1]))
