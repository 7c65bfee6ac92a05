"""`laps-sd scale` and `laps-sd drain`: their flags, and what is said of the answer. What scaling is lives in
scaling.py; a drain is asked of the service."""

from typing import Annotated

import typer

from laps_sd.generate import ApiKey, Ca, Server


def scale(
    workers: Annotated[int, typer.Argument(min=1, help="So many are to serve.")],
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="Of the stack.")] = 50051,
) -> None:
    """Give the `laps-sd up` that runs on this machine more WORKERS, or fewer: those that end drain first."""
    from laps_sd.scaling import NotAsked, ask

    try:
        told = ask(grpc_port, workers)
    except NotAsked as error:
        typer.echo(f"laps-sd: {error}", err=True)
        raise typer.Exit(1) from None
    for word, names in told.items():
        if names:
            typer.echo(f"{word}: {', '.join(names)}")


def drain(
    worker: Annotated[str, typer.Argument(help="As `laps-sd top` names it.")],
    server: Server = "127.0.0.1:50051",
    api_key: ApiKey = None,
    ca: Ca = None,
    force: Annotated[bool, typer.Option("--force", help="Even the last one: requests then wait for another.")] = False,
) -> None:
    """Have WORKER end in good order: it takes nothing new, and what runs there goes on elsewhere. Returns once it
    knows. A key needs the right `admin`."""
    from laps_sd.client import Client, Incompatible, RequestError

    try:
        with Client(server, api_key=api_key, ca=ca) as client:
            remaining = client.drain_worker(worker, force=force)
    except RequestError as error:
        hint = " (--force)" if isinstance(error, Incompatible) else ""
        typer.echo(f"laps-sd: {error.code.name}: {error.message}{hint}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{worker} drains; {remaining} remaining")
