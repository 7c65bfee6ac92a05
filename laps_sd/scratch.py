"""Folders that last as long as the process that made them: Redis keeps its data there where no place is given for it.
Nothing that is to outlive the process lies here."""

import fcntl
import os
import platform
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "laps-sd-"
LOCK = "in-use"  # a file that names the host, locked while the process lives


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder, until the block ends. First, those of killed processes are removed: they hold requests.

    Only on Linux, where the services of a killed process end with it. Where files cannot be locked, folders stay.
    """
    if sys.platform == "linux":
        for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
            with suppress(OSError):  # it is in use, or of another kind
                _remove_if_left(folder)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name, (new := Path(name) / "new").open("w") as lock:
        lock.write(platform.node())
        lock.flush()
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
            new.rename(Path(name) / LOCK)  # it never has this name without being locked
        yield Path(name)


def _remove_if_left(folder: Path) -> None:
    """Raises OSError if a process uses it."""
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        return
    # A link or a pipe in its place is not followed or waited for. To write, since NFS locks no other files.
    file = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(file, "r+b", buffering=0) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock.read() != platform.node().encode():
            return  # locks may not be seen by other hosts
        for each in list(folder.iterdir()):  # the lock last: without it nobody would remove the rest
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            elif each.name != LOCK:
                each.unlink()
        shutil.rmtree(folder)
