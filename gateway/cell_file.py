"""The file that names the cells of a service: a version, and where each cell's schedulers are. Reads it, and says in
which line it is wrong; which cell gets a request is decided in cells.py.

    version = 2

    [[cell]]
    name = "a"
    schedulers = "a-0.example:50052,a-1.example:50052"

    [[cell]]
    name = "b"
    schedulers = "b-0.example:50052"
    since = 2      # the version that added it; default: 1
    drain = true   # it gets no new requests; where that ends, `since` becomes the version that ends it
    model = "m"    # which it serves; needed where cells serve several
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.settings import addresses

_NAME = re.compile("[a-z0-9]{1,16}")
_KINDS: Mapping[str, type] = {"name": str, "schedulers": str, "since": int, "drain": bool, "model": str}
MOST = 256


@dataclass(frozen=True, slots=True)
class Cell:
    """A scheduler, or a pair, with its Redis and its workers. `schedulers`: HOST:PORT of each. `since`: the version of
    the file that added it. `drain`: it gets no new requests. `model`: the only one it serves; empty: any."""

    name: str
    schedulers: tuple[str, ...]
    since: int = 1
    drain: bool = False
    model: str = ""


@dataclass(frozen=True, slots=True)
class CellList:
    version: int
    cells: tuple[Cell, ...]


def read_cells(file: Path) -> CellList:
    """Raises OSError, or ValueError that names file and line."""
    raw = file.read_bytes()
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ValueError(f"{file}:{line}: is not UTF-8") from None
    lines = text.split("\n")
    try:
        told = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = int(found[1]) if (found := re.search(r"line (\d+)", str(error))) else len(lines)
        raise ValueError(f"{file}:{line}: {error}") from None
    except RecursionError:
        raise ValueError(f"{file}:1: brackets within brackets, too deep to be read") from None
    version = told.pop("version", None)
    if type(version) is not int or version < 1:
        raise ValueError(f"{file}:{_line(lines, 'version')}: version: must be a whole number from 1")
    cells = told.pop("cell", [])
    if told or not isinstance(cells, list) or not 1 <= len(cells) <= MOST:
        name = next(iter(told), "cell")
        raise ValueError(
            f"{file}:{_line(lines, name)}: {name}: beside `version` there are 1 to {MOST} [[cell]], no more"
        )
    made: list[Cell] = []
    for number, cell in enumerate(cells):
        try:
            made.append(_cell(cell, version, made))
        except _Wrong as wrong:
            raise ValueError(f"{file}:{_line(lines, wrong.key, number)}: {wrong.key}: {wrong.problem}") from None
    if len({cell.model for cell in made} - {""}) > 1 and any(not cell.model for cell in made):
        number = next(number for number, cell in enumerate(made) if not cell.model)
        raise ValueError(
            f"{file}:{_line(lines, 'model', number)}: model: say it of every cell, where there are several"
        )
    if all(cell.drain for cell in made):
        raise ValueError(f"{file}:{_line(lines, 'drain', 0)}: drain: one cell must be left that takes requests")
    return CellList(version, tuple(made))


class _Wrong(Exception):
    def __init__(self, key: str, problem: str) -> None:
        super().__init__(key)
        self.key, self.problem = key, problem


def _cell(told: Any, version: int, before: list[Cell]) -> Cell:
    if not isinstance(told, dict):
        raise _Wrong("cell", f"{told!r} is none; each begins with a line [[cell]]")
    for key, value in told.items():
        if key not in _KINDS:
            raise _Wrong(key, f"a cell has {', '.join(_KINDS)}")
        if type(value) is not _KINDS[key]:
            raise _Wrong(key, f"{value!r} is of the wrong kind")
    name = told.get("name", "")
    if not _NAME.fullmatch(name):
        raise _Wrong("name", "1 to 16 small letters and digits: it begins the ids of requests")
    if any(cell.name == name for cell in before):
        raise _Wrong("name", f"there are two cells {name!r}")
    since = told.get("since", 1)
    if not 1 <= since <= version:
        raise _Wrong("since", f"must be from 1 to the file's version, {version}")
    try:
        schedulers = addresses(told.get("schedulers", ""))
    except ValueError as error:
        raise _Wrong("schedulers", str(error)) from None
    for other in before:
        if shared := set(other.schedulers) & set(schedulers.split(",")):
            raise _Wrong("schedulers", f"{min(shared)} is one of the cell {other.name!r} already")
    return Cell(name, tuple(schedulers.split(",")), since, told.get("drain", False), told.get("model", ""))


def _line(lines: list[str], key: str, cell: int | None = None) -> int:
    """Where this key stands, from 1: of that cell, or above all; else where the cell, or the file, begins. Cells that
    have no line [[cell]] each are looked for in the whole file."""
    heads = [number for number, line in enumerate(lines, 1) if line.replace(" ", "").startswith("[[cell]]")]
    if cell is None or cell >= len(heads):
        first, last = 1, len(lines)
    else:
        first, last = heads[cell], ([*heads, len(lines) + 1])[cell + 1] - 1
    for number in range(first, last + 1):
        if re.match(rf"\s*(\[\[?)?{re.escape(key)}\b", lines[number - 1]):
            return number
    return first
