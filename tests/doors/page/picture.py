"""`make page-picture`: docs/live-page.png, the live page of a real stack under load. Needs chromium, node and npm."""

import asyncio
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.doors.page.browser import programs, run
from tests.e2e.stack import running_stack

OUT = Path("docs/live-page.png")
LOAD = ("--concurrency", "10", "--requests", "500")  # so many wait or run at any time
COLORS = 128  # of the palette: a quarter of the bytes, and nobody sees it


async def take(model: str) -> None:
    """Raises LookupError without a browser, RuntimeError if the page never showed everything."""
    where = programs()
    with tempfile.TemporaryDirectory() as folder:
        async with running_stack(model, Path(folder), "--slots", "3") as stack:
            command = [sys.executable, "-m", "laps_sd", "loadtest", "--server", stack.grpc, *LOAD]
            quiet = asyncio.subprocess.DEVNULL
            load = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)
            try:
                picture = Path(folder) / "page.png"
                seen = await run("picture", f"http://{stack.http}/", str(picture), where=where)
            finally:
                if load.returncode is None:
                    load.kill()
                await load.wait()
        if not seen["full"]:
            raise RuntimeError("the page never showed running, paused and waiting requests and the policies at once")
        Image.open(picture).convert("RGB").quantize(COLORS).save(OUT, optimize=True)


if __name__ == "__main__":
    asyncio.run(take(sys.argv[1]))
