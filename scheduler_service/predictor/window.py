"""The last finished requests, from which a model is fitted. Bounded; what is older is forgotten."""

import io
import struct
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler_service.predictor.port import Features

FEATURES_VERSION = 1  # to be raised when features, their hashing or the model's arrays change their meaning
WINDOW = 4096  # requests
COLUMNS = 512  # twice as many explain 4 % more of the variance of real lengths, and take four times as long to fit
UNREADABLE = (ValueError, KeyError)  # what reading bytes raises that are damaged or mean something else
CHECKSUM = struct.Struct("<I")

Arrays = dict[str, NDArray[Any]]
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


class Snapshot(NamedTuple):
    """What a predictor remembers at one moment: cheap to take, and nobody changes it afterwards."""

    examples: tuple[Example, ...]
    finished: int


EMPTY = Snapshot((), 0)


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
        if n and (self.counts[:, 0].min() < 1 or self.counts.min() < 0):
            raise ValueError("window: a request without output, or a negative count")

    @classmethod
    def of(cls, snapshot: Snapshot) -> "Window":
        examples, finished = snapshot
        rows = np.stack([example.row for example in examples]) if examples else np.zeros((0, COLUMNS), np.float16)
        counts = np.array([example[1:] for example in examples], np.int64).reshape(-1, 3)
        return cls(rows, counts, finished)

    def snapshot(self) -> Snapshot:
        counts = self.counts.tolist()
        return Snapshot(
            tuple(Example(row, *count) for row, count in zip(self.rows, counts, strict=True)), self.finished
        )

    def arrays(self) -> Arrays:
        return {"rows": self.rows, "counts": self.counts, "finished": np.array(self.finished)}

    @classmethod
    def of_arrays(cls, arrays: Arrays) -> "Window":
        """Raises KeyError or ValueError."""
        return cls(arrays["rows"], arrays["counts"], int(arrays["finished"]))


def pack(arrays: Arrays, *, compress: bool = False) -> bytes:
    """As numpy's own zip of arrays, in which nothing is code, behind a checksum: numpy trusts what it reads."""
    buffer = io.BytesIO()
    save = np.savez_compressed if compress else np.savez
    save(buffer, **arrays)  # type: ignore[arg-type]
    packed = buffer.getvalue()
    return CHECKSUM.pack(zlib.crc32(packed)) + packed


def unpack(packed: bytes) -> Arrays:
    """Raises ValueError if it is not what was packed."""
    body = packed[CHECKSUM.size :]
    if not body or CHECKSUM.unpack_from(packed) != (zlib.crc32(body),):
        raise ValueError(f"checksum of {len(packed)} bytes does not match")
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}
