"""Quantised tensors of a GGUF as groups of numbers with a scale and perhaps a minimum, without a loss: what
gguf.dequantize makes of a tensor, and the float32 weights of its groups, are equal bit for bit. No model is known
here."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker_service.engine.few_bits import Groups
from worker_service.model_files import ModelError

Bytes = npt.NDArray[np.uint8]
Part = npt.NDArray[Any]
# Of each kind: numbers (as they are stored, from 0 on, or already signed), scales and minima of one row of blocks.
Found = tuple[Part, Part, Part | None]


def groups(kind: str, data: Bytes) -> Groups | None:
    """`data`: blocks of this kind [n, bytes of a row]. None: a kind that is not known here. Raises ModelError where a
    scale is no finite number."""
    if kind not in _KINDS:
        return None
    block, bits, read = _KINDS[kind]
    n = len(data)
    numbers, scales, minima = read(data.reshape(-1, block))
    if minima is not None:
        numbers = (numbers.astype(np.int16) - (1 << bits - 1)).astype(np.int8)
    for part in (scales, minima):
        if part is not None and not np.isfinite(part).all():
            raise ModelError(f"a tensor of kind {kind} has a scale that is no finite number: the file is damaged")

    def rows(part: Part) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(part).reshape(n, -1))

    signed = numbers.astype(np.int8, copy=False)
    return Groups(bits, rows(signed), rows(scales), None if minima is None else rows(minima))


def _halves(block: Bytes) -> Part:
    return np.ascontiguousarray(block).view(np.float16)


def _nibbles(packed: Bytes, width: int) -> Bytes:
    """All lower ones of `width` bytes, then all upper ones of them."""
    two = packed.reshape(len(packed), -1, 1, width) >> np.array([0, 4], np.uint8)[:, None] & np.uint8(15)
    return two.reshape(len(packed), -1)


def _fifth(block: Bytes) -> Bytes:
    """A bit for each of 32 numbers, where it belongs."""
    return np.unpackbits(block, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(block: Bytes) -> Found:
    return _nibbles(block[:, 2:], 16).astype(np.int8) - 8, _halves(block[:, :2]), None


def _q4_1(block: Bytes) -> Found:
    return _nibbles(block[:, 4:], 16), _halves(block[:, :2]), _halves(block[:, 2:4])


def _q5_0(block: Bytes) -> Found:
    return (_nibbles(block[:, 6:], 16) | _fifth(block[:, 2:6])).astype(np.int8) - 16, _halves(block[:, :2]), None


def _q5_1(block: Bytes) -> Found:
    return _nibbles(block[:, 8:], 16) | _fifth(block[:, 4:8]), _halves(block[:, :2]), _halves(block[:, 2:4])


def _q8_0(block: Bytes) -> Found:
    return np.ascontiguousarray(block[:, 2:]).view(np.int8), _halves(block[:, :2]), None


def _k_scales(block: Bytes) -> tuple[Part, Part]:
    """Scales and minima of the eight groups in each of these blocks: products of six bits and a half."""
    scale, minimum, rest = block[:, 4:8], block[:, 8:12], block[:, 12:16]
    scales = np.concatenate([scale & 63, (rest & 15) | ((scale >> 2) & 48)], 1)
    minima = np.concatenate([minimum & 63, (rest >> 4) | ((minimum >> 2) & 48)], 1)
    whole = _halves(block[:, :4]).astype(np.float32)
    return whole[:, :1] * scales, -(whole[:, 1:] * minima)


def _q4_k(block: Bytes) -> Found:
    return _nibbles(block[:, 16:], 32), *_k_scales(block)


def _q5_k(block: Bytes) -> Found:
    fifth = block[:, 16:48, None] >> np.arange(8, dtype=np.uint8) & np.uint8(1)
    return _nibbles(block[:, 48:], 32) | fifth.transpose(0, 2, 1).reshape(len(block), -1) << 4, *_k_scales(block)


def _q6_k(block: Bytes) -> Found:
    upper = block[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)
    numbers = _nibbles(block[:, :128], 64) | upper.reshape(len(block), -1) << 4
    scales = np.ascontiguousarray(block[:, 192:208]).view(np.int8) * _halves(block[:, 208:]).astype(np.float32)
    return numbers.astype(np.int8) - 32, scales, None


# Of each kind: bytes of a block, bits of the numbers that it becomes, how it is read.
_KINDS: dict[str, tuple[int, int, Callable[[Bytes], Found]]] = {
    "Q4_0": (18, 4, _q4_0),
    "Q4_1": (20, 4, _q4_1),
    "Q5_0": (22, 8, _q5_0),
    "Q5_1": (24, 8, _q5_1),
    "Q8_0": (34, 8, _q8_0),
    "Q4_K": (144, 4, _q4_k),
    "Q5_K": (176, 8, _q5_k),
    "Q6_K": (210, 8, _q6_k),
}
