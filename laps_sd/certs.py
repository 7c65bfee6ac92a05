"""`laps-sd certs`: its flags and what it says. The certificates are made in authority.py."""

import re
from pathlib import Path
from typing import Annotated

import typer

from laps_sd.lazy import fail


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Gets one folder for each service.")],
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="[ROLE=]NAME", help="A name or address of the service ROLE, or of all; repeatable."),
    ] = None,
    days: Annotated[
        int,
        typer.Option(
            min=1,
            max=36_500,
            help="How long the services' certificates are good for; the authority is good for ten years.",
        ),
    ] = 365,
    namespace: Annotated[
        str | None,
        typer.Option(help="The scheduler's: its user in Redis sees no other keys. Default: as it was, or laps-sd."),
    ] = None,
) -> None:
    """Make a private CA, certificates for mutual TLS and a user of Redis. Run again, it renews the certificates, with
    the names that they have; without, where tls.crt was deleted.

    Each service's folder holds ca.crt, tls.crt and tls.key. Whoever has DIR/ca/ca.key can make more: keep it away.
    """
    from laps_sd.authority import PURPOSES, make_certs
    from scheduler_service.store.acl import NAMESPACE

    if namespace is not None and not re.fullmatch(NAMESPACE, namespace):
        raise typer.BadParameter("letters, digits, '.', '_' and '-' alone", param_hint="--namespace")
    for each in host or ():
        role, equals, name = each.rpartition("=")
        if (equals and role not in PURPOSES) or not name:
            problem = f"{each!r} must be NAME, or ROLE=NAME where ROLE is one of {', '.join(PURPOSES)}"
            raise typer.BadParameter(problem, param_hint="--host")
        if name in PURPOSES:
            problem = f"{name}: another service with this name would pass for that one, which has its own"
            raise typer.BadParameter(problem, param_hint="--host")
    try:
        end = make_certs(folder, host or (), days, namespace)
    except (OSError, ValueError) as error:
        fail(error, folder if isinstance(error, OSError) else None)
    typer.echo(f"{folder}: certificates of {', '.join(PURPOSES)}, good until {end:%Y-%m-%d}")
