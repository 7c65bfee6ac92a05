"""`laps-sd up`: flags, exit codes and signals. Which processes a stack has, and their order, is in stack.py."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from laps_sd.draft_len import parse_draft_len
from laps_sd.redis_server import NoServer
from laps_sd.stack import Emit, Options, Stack, StackError, run, to_stderr
from laps_sd.supervise import GaveUp
from protos.errors import NotServing
from protos.serving import stop_signals


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def up(
    schedulers: Annotated[int, typer.Option(min=1, help="One leads, the others stand by.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes; they share the cores.")] = 1,
    devices: Annotated[
        int,
        typer.Option(min=1, help="Devices that share the model, with one worker: torchrun starts a process on each."),
    ] = 1,
    slots: Annotated[int, typer.Option(min=1, help="Requests that a worker runs in one round.")] = 4,
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a worker's KV memory. Default: 32768.")
    ] = None,
    host_kv_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Of KV, offloaded to the host's memory; default: as --kv-tokens on a GPU, else 0."),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="The order of requests: default (gittins), laps-sd, fcfs, ...")
    ] = "default",
    policy_set: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A policy's setting; repeatable.")
    ] = None,
    model: Annotated[str, typer.Option(help="As in `laps-sd pull`.")] = "smollm2-135m",
    drafter: Annotated[
        str,
        typer.Option(
            metavar="none|ngram|PATH|default",
            help="PATH: of `laps-sd distill`, or of a small model; default: the one that comes with MODEL, or ngram.",
        ),
    ] = "default",
    draft_len: Annotated[
        str, typer.Option(metavar="N|auto", help="Tokens drafted per round; auto: as many as pay.")
    ] = "4",
    device: Annotated[Device, typer.Option()] = Device.auto,
    dtype: Annotated[Dtype, typer.Option(help="auto: bfloat16 where it is native. float32: exact.")] = Dtype.auto,
    redis: Annotated[str | None, typer.Option(metavar="URL", help="Default: it starts a server itself.")] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="For the Redis that it starts; keeps queued requests. Default: one per --grpc-port, none for port 0."
        ),
    ] = None,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="0: any.")] = 50051,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="0: any.")] = 8080,
    api_keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With a line for each key, as `laps-sd key new` prints it.")
    ] = None,
    tenants: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A line `NAME weight=2 requests=9 tokens=9000` each.")
    ] = None,
    max_backlog_s: Annotated[
        str,
        typer.Option(
            metavar="auto|S|inf", help="Seconds of work that may wait; more is refused. auto: 40 mean requests'."
        ),
    ] = "inf",
    certs: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", exists=True, file_okay=False, help="Of `laps-sd certs`: mutual TLS between the services."
        ),
    ] = None,
    metrics_targets: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Metrics of all services, not the gateway's alone; FILE tells Prometheus."),
    ] = None,
    drain_s: Annotated[float, typer.Option(min=0, help="How long running requests may go on after SIGTERM.")] = 30.0,
    log_level: Annotated[LogLevel, typer.Option()] = LogLevel.info,
) -> None:
    """Run the whole stack on this machine until SIGTERM or Ctrl-C; logs on stderr, as JSON lines.

    Prints `ready grpc=HOST:PORT http=HOST:PORT` when a warmed worker serves. Children that die are started again.
    """
    if devices > 1 and workers > 1:
        raise typer.BadParameter("goes with one worker", param_hint="--devices")
    options = Options(
        model=model,
        schedulers=schedulers,
        workers=workers,
        devices=devices,
        slots=slots,
        kv_tokens=kv_tokens,
        host_kv_tokens=host_kv_tokens,
        policy=policy,
        policy_set=tuple(policy_set or ()),
        drafter=check_drafter(drafter),
        draft_len=parse_draft_len(draft_len),
        device=device.value,
        dtype=dtype.value,
        redis=redis,
        data_dir=data_dir,
        grpc_port=grpc_port,
        http_port=http_port,
        api_keys=api_keys,
        max_backlog_s=_backlog(max_backlog_s),
        tenants=tenants,
        certs=certs,
        metrics_targets=metrics_targets,
        drain_s=drain_s,
        log_level=log_level.value,
    )
    run_stack(options, _serve)


async def _serve(stack: Stack) -> None:
    await stack.ready()
    typer.echo(f"ready grpc={stack.grpc} http={stack.http}")
    await asyncio.Event().wait()  # until cancelled by a signal


def run_stack(options: Options, use: Callable[[Stack], Awaitable[None]], emit: Emit = to_stderr) -> bool:
    """Starts the stack, runs `use` until it returns or a signal comes, stops the stack. Returns False after a signal.

    Failures of the stack are printed to stderr. Raises typer.Exit(1) after them.
    """
    finished = failed = False
    try:
        finished = asyncio.run(_until_signal(run(options, use, emit)))
    except* (StackError, NoServer, GaveUp, NotServing, OSError) as failures:
        failed = True
        for failure in failures.exceptions:
            typer.echo(f"laps-sd: {failure}", err=True)
    if failed:
        raise typer.Exit(1)
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


def _backlog(text: str) -> str:
    with suppress(ValueError):
        if text == "auto" or float(text) > 0:
            return text
    raise typer.BadParameter(f"{text!r} is neither auto nor a number of seconds over 0", param_hint="--max-backlog-s")


def check_drafter(drafter: str) -> str:
    if drafter in ("none", "ngram", "default"):
        return drafter
    folder = Path(drafter).expanduser()
    if not folder.is_dir():
        raise typer.BadParameter(
            f"{drafter!r} is none of none, ngram, default, and no directory", param_hint="--drafter"
        )
    return str(folder.resolve())
