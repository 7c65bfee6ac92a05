"""Weights packed for the native kernels, whole or of few bits, and a linear layer that multiplies with them. Whose
weights, and from which file, others decide."""

import ctypes

import torch
from torch.nn.functional import pad

from worker_service.engine import native
from worker_service.engine.few_bits import Groups


class Matrix(ctypes.Structure):
    """`Matrix` of kernels/few_bits.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("numbers", "scales", "minima")),
        *((name, ctypes.c_int32) for name in ("n", "bits", "group", "wide")),
    ]


class Packed:
    """A matrix as the kernels take it. Its outputs are filled up with zeros to whole panels."""

    def __init__(self, weight: torch.Tensor | Groups) -> None:
        """`weight`: [n, k], whole, in a type of `native.TYPES`; or of few bits. Whole ones take 16 bits each where that
        changes none of them: those of a checkpoint in bfloat16 do, whatever type they were loaded in."""
        if isinstance(weight, Groups):
            self.bits, self._group = weight.bits, weight.numbers.shape[1] // weight.scales.shape[1]
            self.outputs, self.inputs = weight.numbers.shape
            self._tensors = [_pack_numbers(weight), *(pack(x, 1) for x in weight[2:] if x is not None)]
        else:
            weight = _narrowed(weight.detach())
            self.bits, self._group = 8 * weight.itemsize, 1
            self.outputs, self.inputs = weight.shape
            self._tensors = [pack(weight)]
        self.padded = self.outputs + -self.outputs % native.PANEL
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors)
        pointers = [tensor.data_ptr() for tensor in self._tensors] + [None] * (3 - len(self._tensors))
        wide = self._tensors[-1].dtype == torch.float32
        self.matrix = Matrix(*pointers, self.padded, self.bits, self._group, wide)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """The weights of these outputs [m], as float32 [m, k]."""
        parts = [x[index // native.PANEL, :, index % native.PANEL] for x in self._tensors]
        if self.bits >= 16:
            return parts[0].float().view(len(index), -1)
        numbers = _unpack_numbers(parts[0], self.bits)
        scales = [x.view(len(index), -1) for x in parts[1:]]
        return Groups(self.bits, numbers, scales[0], scales[1] if len(scales) > 1 else None).weight()


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


def _pack_numbers(groups: Groups) -> torch.Tensor:
    """int8 or, of 4 bits, uint8 [n / 32, k / step, 32, 4]: of `step` numbers the even ones come first."""
    step = 32 // groups.bits
    order = [*range(0, step, 2), *range(1, step, 2)]
    numbers = groups.numbers.view(-1, step)[:, order].view(groups.numbers.shape)
    if groups.bits == 8:
        return pack(numbers, 4)
    numbers = numbers.view(torch.uint8)
    return pack((numbers[:, ::2] & 15) | (numbers[:, 1::2] << 4), 4)


def _unpack_numbers(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The other way round, of rows [m, k / step, 4], to [m, k]."""
    if bits == 4:
        halves = torch.stack([packed << 4, packed & 0xF0], -1).view(torch.int8)  # in the upper half of each byte
        packed = (halves.flatten(-2) // 16).view(*packed.shape[:2], 8)
    even, odd = packed.chunk(2, -1)
    return torch.stack([even, odd], -1).view(len(packed), -1)


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
        return self.packed.rows(torch.arange(self.out_features)).to(self.dtype)

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
        result = torch.empty(self.packed.outputs, self.packed.inputs, dtype=self._dtype)
        for begin in range(0, len(result), 4096):  # each part takes several times its size for a moment
            rows = torch.arange(begin, min(begin + 4096, len(result)))
            result[rows] = self.forward(rows)
        return result

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] to [..., k]."""
        return self.packed.rows(ids.flatten()).to(self._dtype).view(*ids.shape, -1)
