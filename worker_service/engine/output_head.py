"""Output heads of models in 16 bits, with float32 logits: where bfloat16 logits are equal, better ones may differ."""

import torch
from torch.nn.functional import linear


def float32_head(head: torch.nn.Linear) -> torch.nn.Module:
    """One that computes the logits of `head` [..., vocabulary] in float32 from hidden states [..., hidden size]."""
    weight = head.weight
    return MixedHead(head) if multiplies_to_float32(weight.device, weight.dtype) else Float32Head(head)


def multiplies_to_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch on this device has a product of `dtype` whose result is float32; it is tried. Otherwise the weights
    need a copy in float32, and the product goes without the units that are made for 16 bits."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return False
    some = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        return bool((torch.mm(some, some, out_dtype=torch.float32) == 16.0).all())
    except (RuntimeError, TypeError):  # older ones, and devices, that do not have it
        return False


class MixedHead(torch.nn.Module):
    """Numbers of 16 bits are multiplied, their products added in float32: only the order of addition is another than in
    Float32Head."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(head.weight.detach(), requires_grad=False)
        self.bias = None if head.bias is None else head.bias.detach().float()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden size] to [..., vocabulary]."""
        rows = hidden.to(self.weight.dtype).flatten(0, -2)
        logits: torch.Tensor = torch.mm(rows, self.weight.T, out_dtype=torch.float32)
        logits = logits if self.bias is None else logits + self.bias
        return logits.view(*hidden.shape[:-1], len(self.weight))  # of no rows torch could not tell


class Float32Head(torch.nn.Module):
    """With a copy of the weights."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(head.weight.detach().float(), requires_grad=False)
        self.bias = None if head.bias is None else head.bias.detach().float()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden size] to [..., vocabulary]."""
        return linear(hidden.float(), self.weight, self.bias)
