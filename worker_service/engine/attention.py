"""Attention of packed tokens over KV in blocks, and the memory of the blocks. Which block is whose is kv.py's business.

Two ways to the same numbers, up to rounding: the native kernels on a CPU, and torch's own operations anywhere else.
"""

import ctypes
import itertools
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from worker_service.engine import native


class Span(NamedTuple):
    """Tokens begin..begin + n of a round's packed tokens: those of one request from position `start` on."""

    begin: int
    n: int
    start: int
    table: "array[int]"  # ids of the request's blocks, in order


class Shape(NamedTuple):
    layers: int
    heads: int
    kv_heads: int
    dim: int
    blocks: int
    block_tokens: int


class PagedAttention(ABC):
    """Keys and values of all requests of one model, and its attention function in transformers' registry, `name`."""

    _instances: "WeakValueDictionary[int, PagedAttention]" = WeakValueDictionary()
    _handles = itertools.count()

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        blocks = (shape.layers, 2, shape.blocks, shape.kv_heads, *self._block(shape))
        self.data = torch.zeros(blocks, device=device, dtype=dtype)
        self.layers = [(layer[0], layer[1]) for layer in self.data]
        handle = next(self._handles)
        self._instances[handle] = self
        self.name = f"laps_sd_{handle}"
        AttentionInterface.register(self.name, _attention_function(handle))

    @staticmethod
    def _block(shape: Shape) -> tuple[int, int]:
        return shape.block_tokens, shape.dim

    @abstractmethod
    def begin(self, spans: Sequence[Span]) -> None:
        """Say what the packed tokens of the next forward pass are; all its layers share this."""

    @abstractmethod
    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scale: float, window: int
    ) -> torch.Tensor:
        """Write the new `key` and `value` [T, kv heads, dim] into their blocks, then attend over all that precedes.

        `query` and the result: [T, heads, dim]; rows beyond the spans are padding. `window` 0: no sliding window.
        """


def paged_attention(shape: Shape, device: torch.device, dtype: torch.dtype) -> PagedAttention:
    if device.type == "cpu" and NativeAttention.supports(shape, dtype):
        return NativeAttention(shape, device, dtype)
    return TorchAttention(shape, device, dtype)


class NativeAttention(PagedAttention):
    """kernels.cpp."""

    @staticmethod
    def supports(shape: Shape, dtype: torch.dtype) -> bool:
        fits = shape.dim % native.LANES == 0 and shape.block_tokens % native.LANES == 0
        return fits and dtype in (torch.float32, torch.bfloat16) and native.kernels() is not None

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(shape, device, dtype)
        kernels = native.kernels()
        assert kernels is not None
        self._kernel = kernels.attention_float if dtype == torch.float32 else kernels.attention_bfloat16
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self._kernel.argtypes = [pointer, pointer, integer, *[pointer] * 7, ctypes.c_float, integer]
        self._kernel.restype = None
        self._shape = array("i", [shape.heads, shape.kv_heads, shape.dim, shape.block_tokens])
        self._spans = self._tables = array("i")
        self.fixed: tuple[int, ...] = ()
        self._pointers = [(keys.data_ptr(), values.data_ptr()) for keys, values in self.layers]

    def begin(self, spans: Sequence[Span]) -> None:
        self._spans, self._tables = array("i"), array("i")
        for span in spans:
            self._spans.extend((span.begin, span.n, span.start, len(self._tables)))
            self._tables.extend(span.table)
        address = [a.buffer_info()[0] for a in (self._shape, self._spans, self._tables)]
        self.fixed = (address[0], address[1], len(spans), address[2])

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scale: float, window: int
    ) -> torch.Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        out = torch.zeros_like(query)
        self._kernel(
            *self.fixed,
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            *self._pointers[layer],
            out.data_ptr(),
            scale,
            window,
        )
        return out


class TorchAttention(PagedAttention):
    def begin(self, spans: Sequence[Span]) -> None:
        self._spans = spans

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scale: float, window: int
    ) -> torch.Tensor:
        raise NotImplementedError


def _attention_function(handle: int) -> Any:
    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,  # [1, heads, T, dim]
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        if softcap is not None or s_aux is not None:
            raise NotImplementedError(f"attention of {type(module).__name__}: soft caps and sinks are not supported")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        packed = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        out = torch.ops.laps_sd.attention(*packed, handle, module.layer_idx, scale, sliding_window or 0)
        return out.unsqueeze(0), None

    return attention


def _attend(query, key, value, handle, layer, scale, window):
    return PagedAttention._instances[handle].attend(query, key, value, layer, scale, window)


_library = torch.library.Library("laps_sd", "DEF")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, int handle, int layer, float scale, int window) -> Tensor"
)
_library.impl("attention", _attend, "CompositeExplicitAutograd")
_library.impl("attention", lambda query, *_: torch.empty_like(query), "Meta")
