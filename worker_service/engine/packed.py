"""Weights packed for the native kernels, and a linear layer that multiplies with them. Whose weights, others decide."""

import ctypes

import torch
from torch.nn.functional import pad

from worker_service.engine import native


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[n, k] in panels of 32 outputs and steps of 4 bytes, as the kernels want it: [n / 32, k / step, 32, step].

    `n` is filled up with zeros.
    """
    n, k = weight.shape
    weight = pad(weight.detach(), (0, 0, 0, -n % native.PANEL))
    step = 4 // weight.itemsize
    panels = weight.view(-1, native.PANEL, k // step, step).permute(0, 2, 1, 3)
    return native.empty(panels.shape, weight.dtype).copy_(panels)


class PackedLinear(torch.nn.Module):
    """A product with packed weights. Sums and results are float32: bfloat16 logits tie where the model does not."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self._weight, self._bias = pack(linear.weight), None
        if linear.bias is not None:
            self._bias = pad(linear.bias.detach().float(), (0, -linear.out_features % native.PANEL))
        self._outputs, self._inputs = linear.out_features, linear.in_features
        self._kernel = native.function("linear", linear.weight.dtype, *[ctypes.c_void_p] * 4, *[ctypes.c_int] * 3)

    @staticmethod
    def supports(linear: torch.nn.Linear) -> bool:
        weight = linear.weight
        fits = weight.device.type == "cpu" and linear.in_features % 2 == 0
        return fits and weight.dtype in native.TYPES and native.kernels() is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to float32 [..., outputs]."""
        x = x.to(self._weight.dtype).contiguous()
        rows, padded = x.numel() // self._inputs, self._outputs + -self._outputs % native.PANEL
        out = torch.empty((*x.shape[:-1], padded), dtype=torch.float32)
        bias = None if self._bias is None else self._bias.data_ptr()
        self._kernel(x.data_ptr(), self._weight.data_ptr(), bias, out.data_ptr(), rows, padded, self._inputs)
        return out[..., : self._outputs]
