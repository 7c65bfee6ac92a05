"""Folders that last as long as the process that made them: Redis keeps its data there where no place is given for it.
What is to outlive the process never lies here."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "laps-sd-"
LOCK = "in-use"  # a file, locked while the process lives


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder, until the block ends. First, those of killed processes are removed: they hold requests."""
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with suppress(OSError):  # somebody else's, or a folder of another kind
            _remove_if_left(folder)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name, (new := Path(name) / "new").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new.rename(Path(name) / LOCK)  # it never has this name without being locked
        yield Path(name)


def _remove_if_left(folder: Path) -> None:
    """Raises OSError if a process uses it."""
    with (folder / LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder.lstat().st_uid == os.getuid():
            shutil.rmtree(folder)
