"""`laps-sd key`: makes, lists and revokes API keys for the gateway, which checks them and knows what their rights
allow."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from gateway.rights import Right
from laps_sd.lazy import fail

KeysFile = Annotated[
    Path,
    typer.Option(envvar="LAPS_SD_API_KEYS", metavar="FILE", help="Of `laps-sd up --api-keys`; read again on change."),
]


def new(
    tenant: Annotated[str, typer.Argument(help="1 to 64 of the characters A-Z a-z 0-9 . _ -")],
    right: Annotated[list[Right], typer.Option(help="Repeatable.")] = [Right.GENERATE],  # noqa: B006
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of the gateway's --api-keys: the line is added to it.")
    ] = None,
) -> None:
    """Make a key for TENANT. It is printed once; the gateway's file holds its hash."""
    from gateway.keys import new_key, read_entries

    try:
        made, line = new_key(tenant, right)
    except ValueError as error:
        raise typer.BadParameter(str(error).removeprefix("tenant: "), param_hint="TENANT") from None
    try:
        if file is not None:
            if file.is_file():
                read_entries(file.read_text())  # a gateway takes no key of a file that has a wrong line
            with file.open("a+b") as lines:
                lines.seek(max(0, lines.seek(0, os.SEEK_END) - 1))
                unended = lines.read(1) not in (b"", b"\n")  # some editors leave out the last line break
                lines.write(b"\n" * unended + line.encode() + b"\n")
    except (ValueError, OSError) as error:
        fail(error, file)
    typer.echo(f"key: {made}")
    typer.echo(f"line: {line}")


def list_keys(file: KeysFile) -> None:
    """List the keys of FILE: the id that begins each, its tenant, its rights. The keys themselves are in no file."""
    from rich.table import Table
    from rich.text import Text

    from gateway.keys import read_entries
    from laps_sd import terminal

    table = Table(box=None, pad_edge=False)
    for title in ("id", "tenant", "rights", "comment"):
        table.add_column(title, overflow="fold")
    try:
        for id, (entry, comment) in read_entries(file.read_text()).items():
            table.add_row(id, entry.caller.tenant, ",".join(sorted(entry.caller.rights)), Text(comment))
    except (ValueError, OSError) as error:
        fail(error, file)
    terminal.console().print(table)


def revoke(
    id: Annotated[str, typer.Argument(metavar="ID", help="Of `laps-sd key list`, or a key that begins laps_ID_.")],
    file: KeysFile,
) -> None:
    """Take the key ID out of FILE. The gateway refuses it from then on; its running requests end as they would."""
    from gateway.keys import without

    asked = id.split("_")[1] if id.startswith("laps_") and id.count("_") >= 2 else id
    try:
        before = file.stat()
        left = without(file.read_bytes().decode(), asked)
        target = file.resolve()  # not a link to it, which a gateway may not read
        draft = target.with_name(target.name + ".tmp")
        draft.unlink(missing_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as lines:
            os.fchmod(lines.fileno(), before.st_mode & 0o777)
            with suppress(PermissionError):  # only the superuser may, and only for him it matters
                os.fchown(lines.fileno(), before.st_uid, before.st_gid)
            lines.write(left.encode())
        os.replace(draft, target)
    except (ValueError, OSError) as error:
        fail(error, file)
    typer.echo(f"revoked {asked}")
