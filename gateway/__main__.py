"""`python -m gateway`: settings, logs, signals. app.py puts together what is served."""

import asyncio
import faulthandler
import sys

from gateway.app import running, write_ready_file
from gateway.config import Settings
from protos import garbage
from protos.logs import configure_logs
from protos.serving import stop_signals
from protos.settings import read


async def serve(settings: Settings) -> None:
    log = configure_logs("gateway", settings.log_level)
    async with stop_signals() as stopping, running(settings) as gateway:
        searching = asyncio.create_task(garbage.search(lambda: not gateway.cells.live), name="garbage")
        log.info("listening", grpc=gateway.grpc, http=gateway.http)
        if settings.ready_file is not None:
            write_ready_file(settings.ready_file, gateway)
        await stopping.wait()
        log.info("draining", live=gateway.cells.live)
        await gateway.drain(settings.drain_s)
        searching.cancel()
    log.info("stopped")


def main() -> None:
    faulthandler.enable()  # where a library crashes the process, its stacks are told
    # A port that is taken is no bug: the user gets a sentence, not a traceback.
    try:
        asyncio.run(serve(read(Settings, "gateway")))
    except OSError as error:
        sys.exit(f"gateway: {error}")


if __name__ == "__main__":
    main()
