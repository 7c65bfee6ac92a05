"""Files that are read again whenever they change. What is in them is known elsewhere."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

import structlog

T = TypeVar("T")


class Watched(Generic[T]):
    """What `load` makes of some files, made again once one of them has changed; while it fails, as it was before.

    Looked at when asked for: a request costs a stat, and there is no task that could die.
    """

    def __init__(self, files: Iterable[Path], load: Callable[[], T]) -> None:
        """`load` raises OSError or ValueError if the files are of no use, and so does this."""
        self._files, self._load = tuple(files), load
        self._seen = self._stamps()
        self._made = load()

    def get(self) -> T:
        """Never raises."""
        if (stamps := self._stamps()) != self._seen:
            self._seen = stamps  # before they are read: what changes meanwhile is seen the next time
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
    """Changes when the file does; not being there is one more state."""
    try:
        stat = file.stat()
    except OSError:
        return ()
    return (stat.st_ino, stat.st_mtime_ns, stat.st_size)
