"""Which cells an id or a beginning belongs to: rendezvous hashing. Pure; no cell is asked here."""

import hashlib
from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import attrgetter

from gateway.cell_file import Cell
from protos.errors import UnknownModel


def homes_of(request_id: str, cells: Iterable[Cell], model: str | None = None) -> list[str]:
    """Those that may have a request whose id a client chose: the one that gets it now, then those that would have got
    it before a cell was added or drained. `model`: as in Cells.home. Raises UnknownModel."""
    homes: list[str] = []
    for group in _groups(cells, model):
        weights = {cell.name: weight(request_id, cell) for cell in group}
        homes += _winners([cell for cell in group if not cell.drain], weights)
        homes += _winners(group, weights)
    return list(dict.fromkeys(homes))


def weight(key: str, cell: Cell) -> bytes:
    """A key goes to the heaviest cell, and stays there unless that cell goes, or a new one wins."""
    return hashlib.blake2b(f"{cell.name} {key}".encode(errors="replace"), digest_size=8).digest()


def _groups(cells: Iterable[Cell], model: str | None) -> Iterable[list[Cell]]:
    """The cells by the model that the list says they serve."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if model in (None, "") or cell.model in ("", model):
            groups.setdefault(cell.model, []).append(cell)
    if not groups:
        raise UnknownModel(f"model: no cell of this service has {model}")
    return groups.values()


def _winners(cells: list[Cell], weights: Mapping[str, bytes]) -> list[str]:
    """Of the heaviest of these cells at each version that added some of them, the newest first."""
    winners: list[str] = []
    since = attrgetter("since")
    for _, added in groupby(sorted(cells, key=since), key=since):
        best = max([*winners[-1:], *(cell.name for cell in added)], key=weights.__getitem__)
        if winners[-1:] != [best]:
            winners.append(best)
    return winners[::-1]
