"""Blocks of KV in the host's memory, in large arrays that stay. A GPU reads pinned memory: of that torch gives nothing
back, and what copies of one size have left it gives to no copies of another."""

from collections.abc import Iterable, Iterator, Sequence

import torch

ARRAY_BYTES = 16 << 20  # of an array of one layer, at most: torch pins memory in powers of two


class HostBlocks:
    """Room for as many blocks as are asked for at a time. Each has a number."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        """`layers`: their KV on the device, [2, blocks, ...] each."""
        self._layers = layers
        self._each = max(ARRAY_BYTES // max(layer[:, :1].nbytes for layer in layers), 1)  # blocks in an array
        self._arrays: list[list[torch.Tensor]] = []  # of each layer [blocks, 2, ...]
        self._free: list[int] = []

    @property
    def blocks(self) -> int:
        """How many there is memory for by now."""
        return len(self._arrays) * self._each

    def take(self, count: int) -> list[int]:
        """Neighbours, as far as possible."""
        while len(self._free) < count:
            self._free += range(self.blocks, self.blocks + self._each)
            self._arrays.append(
                [
                    torch.empty((self._each, 2, *layer.shape[2:]), dtype=layer.dtype, pin_memory=layer.is_cuda)
                    for layer in self._layers
                ]
            )
        self._free.sort()
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        self._free += blocks

    def pieces(self, blocks: Sequence[int], layer: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """The parts of `blocks` that lie side by side: their places among `blocks`, and their memory [n, 2, ...]."""
        begin = 0
        for end in range(1, len(blocks) + 1):
            if end == len(blocks) or blocks[end] != blocks[end - 1] + 1 or blocks[end] % self._each == 0:
                array, first = divmod(blocks[begin], self._each)
                yield slice(begin, end), self._arrays[array][layer][first : first + end - begin]
                begin = end
