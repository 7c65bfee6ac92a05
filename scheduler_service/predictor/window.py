"""The last finished requests, from which a model is fitted. Bounded; what is older is forgotten."""

import io
import zipfile
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler_service.predictor.port import Features

WINDOW = 4096  # requests
COLUMNS = 512  # twice as many explain 4 % more of the variance of real lengths, and take four times as long to fit
DAMAGE = (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, zlib.error)  # what reading damaged bytes raises

Row = NDArray[np.float16]  # COLUMNS values: the features of one request


def hashed(features: Features) -> Row:
    """Columns by hash, each name with a sign of its own, so that collisions cancel on average (Weinberger et al.,
    "Feature hashing for large scale multitask learning", ICML 2009). Not scikit-learn's FeatureHasher: the scheduler's
    own process does not load that library."""
    row = np.zeros(COLUMNS, np.float32)
    for name, value in features.items():
        place = zlib.crc32(name.encode())
        row[place % COLUMNS] += value if place >> 31 else -value
    return row.astype(np.float16)


class Example(NamedTuple):
    """One finished request."""

    row: Row
    tokens: int
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Window:
    """`rows`: (n, COLUMNS); `counts`: (n, 3), output tokens, drafted and accepted ones; the oldest first.

    `finished`: requests seen until now, those that the window forgot included.
    """

    rows: NDArray[np.float16]
    counts: NDArray[np.int64]
    finished: int

    def __post_init__(self) -> None:
        n = len(self.rows)
        if n > WINDOW or self.rows.shape != (n, COLUMNS) or self.counts.shape != (n, 3) or self.finished < n:
            raise ValueError(f"window: {self.rows.shape} rows, {self.counts.shape} counts of {self.finished} requests")
        if self.rows.dtype != np.float16 or self.counts.dtype != np.int64 or not np.isfinite(self.rows).all():
            raise ValueError("window: its rows must be finite numbers, its counts whole ones")

    @classmethod
    def of(cls, examples: list[Example], finished: int) -> "Window":
        rows = np.stack([example.row for example in examples]) if examples else np.zeros((0, COLUMNS), np.float16)
        counts = np.array([example[1:] for example in examples], np.int64).reshape(-1, 3)
        return cls(rows, counts, finished)

    def examples(self) -> list[Example]:
        counts = self.counts.tolist()
        return [Example(row, *count) for row, count in zip(self.rows, counts, strict=True)]


def pack(arrays: dict[str, NDArray[np.generic]], *, compress: bool = False) -> bytes:
    """As numpy's own zip of arrays: it checks sums, and nothing in it is code."""
    buffer = io.BytesIO()
    save = np.savez_compressed if compress else np.savez
    save(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack(packed: bytes) -> dict[str, NDArray[np.generic]]:
    """Raises one of DAMAGE."""
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}
