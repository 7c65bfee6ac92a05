"""Weights of few bits: what they are, and how whole ones become such. How they lie in memory, packed.py knows."""

from typing import NamedTuple

import torch

_GROUPS = (64, 32)  # weights that share a scale where it is chosen here, the longest first
BITS = {"int8": 8.5, "int4": 5.0}  # of a weight, at most, with its share of scales and minima
_MOST = 65504.0  # that a scale can hold


class Groups(NamedTuple):
    """Weights [n, k] of few bits: scale * number, or scale * (number + 2**(bits - 1)) + minimum."""

    bits: int  # 8 or 4
    numbers: torch.Tensor  # int8 [n, k], signed
    scales: torch.Tensor  # [n, k / group], float32, or float16 if all are
    minima: torch.Tensor | None  # as scales

    def weight(self) -> torch.Tensor:
        """The float32 weights [n, k] that they stand for."""
        n, groups = self.scales.shape
        numbers = self.numbers.view(n, groups, -1).float()
        lift = 0 if self.minima is None else 2 ** (self.bits - 1)
        weight: torch.Tensor = (numbers + lift) * self.scales.float()[..., None]
        if self.minima is not None:
            weight += self.minima.float()[..., None]
        return weight.view(n, -1)


def quantise(weight: torch.Tensor, bits: int) -> Groups:
    """[n, k] in 8 bits by a scale, or 4 bits by a scale and a minimum, for each group. Raises ValueError where `k` has
    no groups, or a weight is not finite or too large."""
    n, k = weight.shape
    group = next((size for size in _GROUPS if k % size == 0 and (bits == 8 or size == 32)), 0)
    if not group:
        raise ValueError(f"{k} inputs are no multiple of {_GROUPS[-1]}")
    whole = weight.detach().float().view(n, -1, group)
    if not whole.abs().max() < _MOST:
        raise ValueError("a weight is not finite")
    if bits == 8:
        scales = (whole.abs().amax(-1) / 127).half()
        return Groups(8, _steps(whole, scales).clamp(-127, 127).to(torch.int8).view(n, k), scales, None)
    minima = whole.amin(-1).half()
    scales = ((whole.amax(-1) - minima.float()) / 15).half()
    steps = _steps(whole - minima.float()[..., None], scales).clamp(0, 15)
    return Groups(4, (steps - 8).to(torch.int8).view(n, k), scales, minima)


def _steps(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The nearest whole multiples of each group's scale, as float32."""
    own = scales.float()[..., None]
    return torch.where(own == 0, 0.0, values / own).round()
