"""Numbers on their way to the model's device, such that nobody waits for it."""

from collections.abc import Sequence
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
