"""The last finished requests, from which a model is fitted, and their bytes. Bounded; what is older is forgotten."""

import io
import struct
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler_service.predictor.port import Features

FEATURES_VERSION = 3  # to be raised when features, their hashing or the model's arrays change their meaning
WINDOW = 4096  # requests
COLUMNS = 2**16  # so many that words seldom collide: 512 explain a fifth less of the variance of real lengths
UNREADABLE = (ValueError, KeyError)  # what reading bytes raises that are damaged or mean something else
CHECKSUM = struct.Struct("<I")

Arrays = dict[str, NDArray[Any]]


class Row(NamedTuple):
    """The features of one request that are not 0."""

    columns: NDArray[np.uint16]
    values: NDArray[np.float32]


def hashed(features: Features | Row) -> Row:
    """Columns by hash, each name with a sign of its own, so that collisions cancel on average (Weinberger et al.,
    "Feature hashing for large scale multitask learning", ICML 2009)."""
    if isinstance(features, Row):
        return features
    values: dict[int, float] = {}
    for name, value in features.items():
        place = zlib.crc32(name.encode())
        column = place % COLUMNS
        values[column] = values.get(column, 0.0) + (value if place >> 31 else -value)
    return Row(np.array(list(values), np.uint16), np.array(list(values.values()), np.float32))


class Example(NamedTuple):
    """One finished request. `cut`: its bound ended it, so that it would have had more tokens."""

    row: Row
    tokens: int
    drafted: int
    accepted: int
    cut: bool = False


class Snapshot(NamedTuple):
    """What a predictor remembers at one moment: cheap to take, and nobody changes it afterwards."""

    examples: tuple[Example, ...]
    finished: int


EMPTY = Snapshot((), 0)


@dataclass(frozen=True, slots=True)
class Window:
    """Of n requests, the oldest first. `counts` (n, 4): output tokens, drafted and accepted ones, and 1 if its bound
    has cut it. Request i has the entries from starts[i] to starts[i + 1] of `columns` and `values`. `finished`:
    requests seen until now, those that the window forgot included."""

    counts: NDArray[np.int64]
    starts: NDArray[np.int64]
    columns: NDArray[np.uint16]
    values: NDArray[np.float32]
    finished: int

    def __post_init__(self) -> None:
        n = len(self.counts)
        if n > WINDOW or self.counts.shape != (n, 4) or self.finished < n or self.starts.shape != (n + 1,):
            raise ValueError(f"window: {n} counts, {len(self.starts)} starts of {self.finished} requests")
        if self.starts[0] != 0 or not len(self.columns) == len(self.values) == self.starts[-1]:
            raise ValueError(f"window: {len(self.columns)} columns and {len(self.values)} values")

    @classmethod
    def of(cls, snapshot: Snapshot) -> "Window":
        rows = [example.row for example in snapshot.examples]
        return cls(
            np.array([example[1:] for example in snapshot.examples], np.int64).reshape(-1, 4),
            np.cumsum([0, *(len(row.columns) for row in rows)]),
            np.concatenate([np.zeros(0, np.uint16), *(row.columns for row in rows)]),
            np.concatenate([np.zeros(0, np.float32), *(row.values for row in rows)]),
            snapshot.finished,
        )

    def snapshot(self) -> Snapshot:
        inner = self.starts[1:-1]
        rows = map(Row, np.split(self.columns, inner), np.split(self.values, inner))
        examples = (Example(row, *counts) for row, counts in zip(rows, self.counts.tolist(), strict=False))
        return Snapshot(tuple(examples), self.finished)

    def arrays(self) -> Arrays:
        names = ("counts", "starts", "columns", "values", "finished")
        return {name: np.asarray(getattr(self, name)) for name in names}

    @classmethod
    def of_arrays(cls, arrays: Arrays) -> "Window":
        """Raises KeyError or ValueError."""
        counts, starts, columns, values = (arrays[name] for name in ("counts", "starts", "columns", "values"))
        return cls(counts, starts, columns, values, int(arrays["finished"]))


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
