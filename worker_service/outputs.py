"""Files that a command writes when its work is done: whether they can be written is said before it begins."""

import os
from pathlib import Path

import typer


def writable(file: Path | None) -> Path | None:
    """For an option's `callback`: the file, which is not made yet. Raises typer.BadParameter."""
    if file is not None:
        there = file.exists()
        place = file if there else Path(os.path.realpath(file))  # a link with nothing behind it stays
        try:
            place.open("ab").close()
            if not there:
                place.unlink()
        except OSError as error:
            raise typer.BadParameter(f"{file} cannot be written: {error.strerror}") from None
    return file
