"""Numbers on their way to the model's device, such that nobody waits for it."""

import torch


def sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`numbers` of the host on `device`. To a GPU they go through pinned memory: any other copy would wait until all
    that was launched before is done."""
    if device.type != "cuda":
        return numbers.to(device)
    return torch.empty_like(numbers, pin_memory=True).copy_(numbers).to(device, non_blocking=True)
