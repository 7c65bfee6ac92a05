"""`laps-sd worker`: one worker that joins a service that runs already, started again when it dies. Its flags are those
of `laps-sd up` that concern a worker (options.py)."""

from typing import Annotated, Any

import typer

from laps_sd.flags import flags_of, takes_flags_of
from laps_sd.options import Options

FLAGS = {name for name, flag in flags_of(Options).items() if flag.service == "worker"} - {"workers"}


@takes_flags_of(Options, only=FLAGS | {"certs", "log_level"})
def worker(
    context: typer.Context,
    *,
    join: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            envvar="LAPS_SD_JOIN",
            help="Of the scheduler: HOST:PORT, as `laps-sd up` tells it; of a pair both, with a comma.",
        ),
    ],
    name: Annotated[str, typer.Option(help="Unique in the service. Default: host and process.")] = "",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of the model; 0: all cores.")] = 0,
    **told: Any,
) -> None:
    """Run a worker that joins a running service, until SIGTERM, Ctrl-C or `laps-sd drain`. It is started again if it
    dies.

    A worker whose model or version the service does not take is told so, and leaves.
    """
    from laps_sd.checks import Wrong, check_worker
    from protos.settings import addresses

    told.pop("config")
    options = Options(**told, draft_len=None, services=context.obj or {})
    try:
        addresses(join)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--join") from None
    try:
        check_worker(options)
        from laps_sd.service_checks import check_joining  # it loads much

        check_joining(options)
    except Wrong as wrong:
        raise typer.BadParameter(wrong.problem, param_hint=wrong.setting) from None
    from laps_sd.serve import run_to_end

    run_to_end(_run(options, join, name, threads))


async def _run(options: Options, join: str, name: str, threads: int) -> None:
    import asyncio
    import os
    import socket
    from functools import partial

    from laps_sd.find_model import find_model
    from laps_sd.machine import cores
    from laps_sd.stack import emit_entry, to_stderr, worker_named
    from laps_sd.supervise import Child

    name = name or f"{socket.gethostname()}-{os.getpid()}"
    command = worker_named(name, options, join, await find_model(options.model), threads or cores(), joins=True)
    child = Child(command, partial(emit_entry, to_stderr, name))
    running = asyncio.create_task(child.keep_running())
    try:
        await asyncio.shield(running)
    finally:
        await child.stop()
        await running
