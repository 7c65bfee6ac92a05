"""Weights packed for the native kernels, whole or of few bits, and a linear layer that multiplies with them. Whose
weights, and from which file, others decide."""

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad

from worker_service.engine import native
from worker_service.engine.few_bits import Groups


class Matrix(ctypes.Structure):
    """`Matrix` of kernels/groups.h."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("n", "bits", "group", "wide", "minima")),
    ]


class Packed:
    """A matrix as the kernels take it. Its outputs are filled up with zeros to whole panels."""

    def __init__(self, weight: torch.Tensor | Groups) -> None:
        """`weight`: [n, k], whole, in a type of `native.TYPES`; or of few bits. Whole ones take 16 bits each where that
        changes none of them: those of a checkpoint in bfloat16 do, whatever type they were loaded in."""
        if isinstance(weight, Groups):
            self.bits, (self.outputs, self.inputs) = weight.bits, weight.numbers.shape
            wide, minima = weight.scales.dtype == torch.float32, weight.minima is not None
            self._groups = self.inputs // weight.scales.shape[1], wide, minima
            self._memory = _pack_groups(weight)
        else:
            weight = _narrowed(weight.detach())
            self.bits, (self.outputs, self.inputs) = 8 * weight.itemsize, weight.shape
            self._groups = 1, False, False
            self._memory = pack(weight).view(torch.uint8).flatten()
        self.nbytes, self.padded = len(self._memory), self.outputs + -self.outputs % native.PANEL

    @property
    def matrix(self) -> Matrix:
        """Of the memory where the weights are now."""
        return Matrix(self._memory.data_ptr(), self.padded, self.bits, *self._groups)

    def move(self, memory: torch.Tensor) -> None:
        """Into these bytes; those that held the weights before are given up."""
        self._memory = memory.copy_(self._memory)

    def rows(self, index: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weights of these outputs [m], as `dtype` [m, k]. Raises IndexError where there is no such output."""
        index, out = index.to("cpu", torch.long).contiguous(), torch.empty(len(index), self.inputs, dtype=dtype)
        sizes = self.outputs, len(index), self.inputs
        if not _widen(dtype)(ctypes.byref(self.matrix), index.data_ptr(), *sizes, out.data_ptr()):
            raise IndexError(f"there are {self.outputs} outputs, not all of those that were asked for")
        return out


@functools.cache
def _widen(dtype: torch.dtype) -> Callable[..., bool]:
    """`widen` of kernels/kernels.cpp."""
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    return native.function("widen", dtype, pointer, pointer, *[integer] * 3, pointer, result=ctypes.c_bool)


def gather(parts: Sequence[Packed]) -> None:
    """Move them into one piece of memory, in the order in which they are multiplied. What a product asks for ahead, at
    its end, is then the beginning of the next one. To be called before anybody has taken a `matrix` of theirs."""
    memory, end = native.empty([sum(part.nbytes for part in parts)], torch.uint8), 0
    for part in parts:
        begin, end = end, end + part.nbytes
        part.move(memory[begin:end])


def _narrowed(weight: torch.Tensor) -> torch.Tensor:
    """In bfloat16, if these are the same numbers."""
    narrow = weight.bfloat16()
    return narrow if torch.equal(narrow.to(weight.dtype), weight) else weight


def pack(weight: torch.Tensor, step: int = 0) -> torch.Tensor:
    """[n, k] in panels of 32 outputs and steps of 4 bytes, as the kernels want it: [n / 32, k / step, 32, step].

    `n` is filled up with zeros.
    """
    (n, k), weight, dtype = weight.shape, weight.detach(), weight.dtype
    if n % native.PANEL:
        weight = pad(weight, (0, 0, 0, -n % native.PANEL))
    step = step or 4 // weight.itemsize
    if step * weight.itemsize == 4:  # a step is moved at once, which takes a third less time
        weight, k, step = weight.contiguous().view(torch.int32), k // step, 1
    panels = weight.view(-1, native.PANEL, k // step, step).transpose(1, 2)
    return native.empty(panels.shape, weight.dtype).copy_(panels).view(dtype)


def _pack_groups(groups: Groups) -> torch.Tensor:
    """Bytes: of each group of a panel its numbers from 0 on, scales and minima."""
    count = groups.scales.shape[1]
    numbers = groups.numbers.view(torch.uint8) + (1 << (groups.bits - 1))
    if groups.bits == 4:
        numbers = numbers & 15
        eights = numbers.view(len(numbers), -1, 2, 4)
        numbers = (eights[:, :, 0] | eights[:, :, 1] << 4).flatten(1)
    parts = [pack(numbers, 4), *(pack(part, 1) for part in groups[2:] if part is not None)]
    together = [part.view(torch.uint8).reshape(len(part), count, -1) for part in parts]
    memory = native.empty((*together[0].shape[:2], sum(part.shape[2] for part in together)), torch.uint8)
    return torch.cat(together, -1, out=memory).flatten()


class PackedLinear(torch.nn.Module):
    """A product with packed weights. Sums are float32, and results, if nothing else is said: bfloat16 logits tie where
    the model does not."""

    def __init__(
        self, linear: torch.nn.Linear, weights: Packed | None = None, result: torch.dtype = torch.float32
    ) -> None:
        """In the place of `linear`, with its weights or others. Activations have the type that its own weights have."""
        super().__init__()
        self.dtype, self._result = linear.weight.dtype, result
        self.packed = weights or Packed(linear.weight)
        self.out_features, self.in_features = self.packed.outputs, self.packed.inputs
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self._padded = None if self.bias is None else pad(self.bias, (0, -self.out_features % native.PANEL))
        self._kernel = native.function("linear", self.dtype, *[ctypes.c_void_p] * 4, *[ctypes.c_int] * 2)

    @staticmethod
    def supports(linear: torch.nn.Linear) -> bool:
        weight = linear.weight
        fits = weight.device.type == "cpu" and linear.in_features % 2 == 0
        return fits and weight.dtype in native.TYPES and native.kernels() is not None

    @property
    def weight(self) -> torch.Tensor:
        """The weights [n, k] anew, in the type of activations: for those who need some of them once."""
        return self.packed.rows(torch.arange(self.out_features), self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., outputs]."""
        x = x.to(self.dtype).contiguous()
        out = torch.empty((*x.shape[:-1], self.packed.padded), dtype=torch.float32)
        bias = None if self._padded is None else self._padded.data_ptr()
        matrix = ctypes.byref(self.packed.matrix)
        self._kernel(x.data_ptr(), matrix, bias, out.data_ptr(), x.numel() // self.in_features, self.in_features)
        return out[..., : self.out_features].to(self._result)


class PackedEmbedding(torch.nn.Module):
    """Rows of packed weights, looked up."""

    def __init__(self, weights: Packed, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed, self._dtype = weights, dtype

    @property
    def weight(self) -> torch.Tensor:
        """All rows [n, k] anew."""
        return self.packed.rows(torch.arange(self.packed.outputs), self._dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] to [..., k]."""
        return self.packed.rows(ids.flatten(), self._dtype).view(*ids.shape, -1)
