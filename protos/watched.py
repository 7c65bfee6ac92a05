"""Files that are read again whenever they change. What is in them is decided by the caller."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

import structlog

T = TypeVar("T")


class Watched(Generic[T]):
    """The result of `load`, which reads some files. It is loaded again when one of them has changed; if that fails, the
    last result stays.

    The files are looked at in `get`, which costs a stat for each. No task in the background could die unnoticed.
    """

    def __init__(self, files: Iterable[Path], load: Callable[[], T]) -> None:
        """Loads once. Raises what `load` raises: OSError or ValueError if the files cannot be used."""
        self._files, self._load = tuple(files), load
        self._seen = self._stamps()
        self._made = load()

    def get(self) -> T:
        """The newest result. Never raises."""
        if (stamps := self._stamps()) != self._seen:
            self._seen = stamps  # before reading, so that a change during the read is seen the next time
            log = structlog.get_logger().bind(files=[str(file) for file in self._files])
            try:
                self._made = self._load()
                log.info("file_read_again")
            except (OSError, ValueError) as error:
                log.error("file_unusable", reason=str(error))
        return self._made

    def _stamps(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(_stamp, self._files))


def _stamp(file: Path) -> tuple[int, ...]:
    """Differs after every change of the file, and of who may read it. () if there is no such file."""
    try:
        stat = file.stat()
    except OSError:
        return ()
    return (stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)
