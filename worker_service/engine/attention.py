"""Attention of packed tokens over KV in blocks, and the memory of the blocks. Whose blocks they are, kv.py knows.

There are two ways to the same numbers, up to rounding: the native kernels on a CPU, torch's own operations anywhere
else.
"""

import ctypes
import itertools
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from worker_service.engine import native
from worker_service.engine.shape import AttentionShape


class QueryRange(NamedTuple):
    """The packed tokens begin..begin + n of a pass: they are those of one request from position `start` on."""

    begin: int
    n: int
    start: int
    table: "array[int]"  # the request's blocks, in order


_handles = itertools.count()


class PagedAttention(ABC):
    """Keys and values of all requests of one model. `name` is its attention function in transformers' registry."""

    def __init__(self, data: torch.Tensor) -> None:
        """`data`: [layers, 2 (key, value), blocks, kv heads, block_tokens * dim]."""
        self._data = data
        handle = next(_handles)
        _instances[handle] = self
        self.name = f"laps_sd_{handle}"
        AttentionInterface.register(self.name, _attention_function(handle))

    @abstractmethod
    def begin(self, ranges: Sequence[QueryRange]) -> None:
        """Say whose the packed tokens of the next forward pass are; all its layers share this."""

    @abstractmethod
    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scale: float, window: int
    ) -> torch.Tensor:
        """Write the new `key` and `value` [T, kv heads, dim] into their blocks, then attend over all up to each token.

        `query` and the result: [T, heads, dim]. `window`: how many tokens back a token sees, itself included; 0: all.
        """

    def save(self, table: Sequence[int]) -> torch.Tensor:
        """A copy of these blocks in the host's memory: [layers, 2, blocks, ...]; pinned, if a GPU is to read it."""
        layers, two, _, *block = self._data.shape
        saved = torch.empty(layers, two, len(table), *block, dtype=self._data.dtype, pin_memory=self._data.is_cuda)
        for own, layer in zip(saved, self._data, strict=True):  # one at a time: the device's memory is short just now
            own.copy_(layer[:, list(table)])
        return saved

    def restore(self, table: Sequence[int], saved: torch.Tensor) -> None:
        """Write what `save` returned into these blocks."""
        for own, layer in zip(saved, self._data, strict=True):
            layer[:, list(table)] = own.to(layer.device)


_instances: WeakValueDictionary[int, PagedAttention] = WeakValueDictionary()


def paged_attention(
    shape: AttentionShape, blocks: int, block_tokens: int, device: torch.device, dtype: torch.dtype
) -> PagedAttention:
    """Attention with memory for `blocks` blocks of `block_tokens` tokens each, by the faster way that is possible."""
    if device.type == "cpu" and NativeAttention.supports(shape, block_tokens, dtype):
        return NativeAttention(shape, blocks, block_tokens, dtype)
    return TorchAttention(shape, blocks, block_tokens, device, dtype)


def _memory(shape: AttentionShape, blocks: int, block_tokens: int) -> tuple[int, int, int, int, int]:
    return shape.layers, 2, blocks, shape.kv_heads, block_tokens * shape.dim


class NativeAttention(PagedAttention):
    """kernels/attention.h, for a CPU."""

    @staticmethod
    def supports(shape: AttentionShape, block_tokens: int, dtype: torch.dtype) -> bool:
        fits = shape.dim % native.LANES == 0 and block_tokens % native.LANES == 0
        return fits and dtype in native.TYPES and native.kernels() is not None

    def __init__(self, shape: AttentionShape, blocks: int, block_tokens: int, dtype: torch.dtype) -> None:
        super().__init__(native.empty(_memory(shape, blocks, block_tokens), dtype))
        self.shape, self.block_tokens, self.dtype = shape, block_tokens, dtype
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self._kernel = native.function(
            "attention", dtype, pointer, pointer, integer, *[pointer] * 7, ctypes.c_float, integer
        )
        self._shape = array("i", [shape.heads, shape.kv_heads, shape.dim, block_tokens])
        self.pointers = [(layer[0].data_ptr(), layer[1].data_ptr()) for layer in self._data]
        self.begin(())

    def begin(self, ranges: Sequence[QueryRange]) -> None:
        self._ranges, self._tables = array("i"), array("i")
        for each in ranges:
            self._ranges.extend((each.begin, each.n, each.start, len(self._tables)))
            self._tables.extend(each.table)
        self.ranges = self._ranges.buffer_info()[0], len(ranges), self._tables.buffer_info()[0]  # for the kernels

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scale: float, window: int
    ) -> torch.Tensor:
        heads, size = [tuple(x.shape[1:]) for x in (query, key, value)], self.shape
        if heads != [(size.heads, size.dim), *[(size.kv_heads, size.dim)] * 2]:
            raise NotImplementedError(f"heads of sizes {heads}, where the configuration says {size}")
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        out = torch.empty_like(query)
        new = query.data_ptr(), key.data_ptr(), value.data_ptr()
        shape = self._shape.buffer_info()[0]
        self._kernel(shape, *self.ranges, *new, *self.pointers[layer], out.data_ptr(), scale, window)
        return out


class _Group:
    """Query ranges that are computed as one padded batch of B."""

    def __init__(self, ranges: Sequence[QueryRange], block_tokens: int, device: torch.device) -> None:
        longest, blocks = max(r.n for r in ranges), max(-(-(r.start + r.n) // block_tokens) for r in ranges)
        # Padding repeats a range's last token and first block. It costs time, and its results are not used.
        self.rows = torch.tensor(
            [[r.begin + min(i, r.n - 1) for i in range(longest)] for r in ranges], device=device
        )  # [B, longest]
        self.tables = torch.tensor(
            [[*r.table[:blocks], *[r.table[0]] * (blocks - len(r.table))] for r in ranges], device=device
        )  # [B, blocks]
        self._positions = torch.tensor(
            [[r.start + min(i, r.n - 1) for i in range(longest)] for r in ranges], device=device
        )
        self._keys = torch.arange(blocks * block_tokens, device=device)
        self._masks: dict[int, torch.Tensor] = {}

    def mask(self, window: int) -> torch.Tensor:
        """Which keys each token sees [B, 1, longest, keys]: none after it, and none further back than `window`."""
        if window not in self._masks:
            own = self._positions[:, :, None]
            seen = self._keys <= own
            self._masks[window] = (seen & (self._keys > own - window) if window else seen)[:, None]
        return self._masks[window]


class TorchAttention(PagedAttention):
    """For any device: blocks are gathered, for all short query ranges together and for each long one by itself."""

    _SHORT = 16  # tokens

    def __init__(
        self, shape: AttentionShape, blocks: int, block_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        memory = _memory(shape, blocks, block_tokens)
        super().__init__(torch.zeros(memory, device=device, dtype=dtype))  # what is masked must be finite
        self._block_tokens = block_tokens
        self._layers = self._data.view(*self._data.shape[:-1], block_tokens, shape.dim)

    def begin(self, ranges: Sequence[QueryRange]) -> None:
        device, size = self._data.device, self._block_tokens
        short = [each for each in ranges if each.n <= self._SHORT]
        groups = ([short] if short else []) + [[each] for each in ranges if each.n > self._SHORT]
        self._groups = [_Group(group, size, device) for group in groups]
        places = [(r.table[at // size], at % size) for r in ranges for at in range(r.start, r.start + r.n)]
        self._new_blocks, self._new_offsets = torch.tensor(places, device=device).T

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scale: float, window: int
    ) -> torch.Tensor:
        keys, values = self._layers[layer]
        keys[self._new_blocks, :, self._new_offsets] = key
        values[self._new_blocks, :, self._new_offsets] = value
        out = torch.empty_like(query)
        for group in self._groups:
            past_keys, past_values = (x[group.tables].transpose(1, 2).flatten(2, 3) for x in (keys, values))
            result = scaled_dot_product_attention(
                query[group.rows].transpose(1, 2),
                past_keys,  # [B, kv heads, keys, dim]
                past_values,
                attn_mask=group.mask(window),
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            out[group.rows] = result.transpose(1, 2)
        return out


def _attention_function(handle: int) -> Callable[..., tuple[torch.Tensor, None]]:
    """What transformers calls in each layer. It does not keep its PagedAttention alive: the registry would, forever."""

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,  # [1, heads, T, dim]
        key: torch.Tensor,  # [1, kv heads, T, dim]
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,  # None: this attention has no mask function, it makes its own
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        if softcap is not None or s_aux is not None:
            raise NotImplementedError(f"attention of {type(module).__name__}: soft caps and sinks are not supported")
        layer: int = module.layer_idx  # type: ignore[assignment]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = _instances[handle].attend(q, k, v, layer, scale, sliding_window or 0)
        return out[None], None

    return attention
