"""`laps-sd key`: makes API keys for the gateway, which checks them and knows what their rights allow."""

import os
from pathlib import Path
from typing import Annotated

import typer

from gateway.rights import Right


def new(
    tenant: Annotated[str, typer.Argument(help="1 to 64 of the characters A-Z a-z 0-9 . _ -")],
    right: Annotated[list[Right], typer.Option(help="Repeatable.")] = [Right.GENERATE],  # noqa: B006
    file: Annotated[Path | None, typer.Option(help="Of the gateway's --api-keys: the line is added to it.")] = None,
) -> None:
    """Make a key for TENANT. It is printed once; the gateway's file holds its hash."""
    from gateway.keys import new_key

    try:
        made, line = new_key(tenant, right)
        if file is not None:
            with file.open("a+b") as lines:
                lines.seek(max(0, lines.seek(0, os.SEEK_END) - 1))
                unended = lines.read(1) not in (b"", b"\n")  # some editors leave out the last line break
                lines.write(b"\n" * unended + line.encode() + b"\n")
    except (ValueError, OSError) as error:
        typer.echo(f"laps-sd: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"key: {made}")
    typer.echo(f"line: {line}")
