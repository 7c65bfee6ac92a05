"""`laps-sd certs`: its flags and what it says. The certificates are made in authority.py."""

from pathlib import Path
from typing import Annotated

import typer


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Gets one folder for each service.")],
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address that services are reached under; repeatable.")
    ] = None,
    days: Annotated[
        int, typer.Option(min=1, max=36_500, help="How long the services' certificates are good for.")
    ] = 365,
    namespace: Annotated[str, typer.Option(help="The scheduler's: its user in Redis sees no other keys.")] = "laps-sd",
) -> None:
    """Make a private CA, certificates for mutual TLS and a user of Redis. Run again, it renews the certificates.

    Each service's folder holds ca.crt, tls.crt and tls.key. Whoever has DIR/ca/ca.key can make more: keep it away.
    """
    from laps_sd.authority import PURPOSES, make_certs

    if taken := PURPOSES.keys() & set(host or ()):
        problem = f"{', '.join(taken)}: every service gets these names, and would pass for that one, which has its own"
        raise typer.BadParameter(problem, param_hint="--host")
    try:
        make_certs(folder, host or (), days, namespace)
    except (OSError, ValueError) as error:
        words = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        typer.echo(f"laps-sd: {words}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{folder}: certificates of {', '.join(PURPOSES)}, good for {days} days")
