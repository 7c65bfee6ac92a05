"""Numbers on their way to the model's device and KV on its way from there, such that nobody waits for it."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch


def sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`numbers` of the host on `device`. To a GPU they go through pinned memory: any other copy would wait until all
    that was launched before is done."""
    if device.type != "cuda":
        return numbers.to(device)
    return torch.empty_like(numbers, pin_memory=True).copy_(numbers).to(device, non_blocking=True)


def sent_together(arrays: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
    """Integers below 2**31, in arrays of any shape or in lists, as int64 on `device`: to a GPU in one copy."""
    if device.type != "cuda":
        return [torch.tensor(array, dtype=torch.long, device=device) for array in arrays]
    known = [np.asarray(array, np.int32) for array in arrays]
    ends = np.cumsum([0, *(array.size for array in known)]).tolist()
    whole = torch.empty(ends[-1], dtype=torch.int32, pin_memory=True)
    np.concatenate([array.ravel() for array in known], out=whole.numpy())
    there = whole.to(device, non_blocking=True).long()
    return [there[a:b].view(array.shape) for (a, b), array in zip(pairwise(ends), known, strict=True)]


_UNDER_WAY = 4  # copies at most, each of which keeps its source in the device's memory


class Leaving:
    """Copies to the host's memory on a stream of a GPU's own, beside passes. No GPU has run this yet."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ends = deque[torch.cuda.Event]()

    def take(self, part: torch.Tensor, pieces: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy pieces of `part` to pinned memory each, where they are whole after `wait`. `part` may be given up at
        once."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for own, there in pieces:
                there.copy_(own, non_blocking=True)
        part.record_stream(self._stream)
        self._ends.append(self._stream.record_event())
        if len(self._ends) > _UNDER_WAY:
            self._ends.popleft().synchronize()

    def wait(self) -> None:
        """Until all copies are whole: the host reads some of what it sends back."""
        self._stream.synchronize()
