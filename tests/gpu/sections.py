"""The sections of the check by name, and what each is given. A section runs in a process of its own."""

from collections.abc import Callable
from time import monotonic
from typing import Any

import torch

from tests.gpu import bench, exactness, families, machine, preemption
from tests.gpu.plan import Size


class Section:
    """Where a section runs, how large it is, how long it may take, and where it puts what it finds."""

    def __init__(self, device: str, size: Size, seconds: float, write: Callable[[dict[str, Any]], None]) -> None:
        self.device, self.size = torch.device(device), size
        self.found: dict[str, Any] = {"wrong": []}
        self._write, self._end = write, monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._end - monotonic()

    def put(self, **found: Any) -> None:
        """Keep this, whatever comes after."""
        self.found |= found
        self._write(self.found)

    def add(self, name: str, row: dict[str, Any]) -> None:
        """As `put`, of one more row of a list."""
        self.put(**{name: [*self.found.get(name, []), row]})

    def wrong(self, problem: str) -> None:
        self.put(wrong=[*self.found["wrong"], problem])


SECTIONS: dict[str, Callable[[Section], None]] = {
    "machine": machine.check,
    "exactness": exactness.check,
    "bench": bench.check,
    "graphs": bench.check_graphs,
    "preemption": preemption.check,
    "families": families.check,
}
