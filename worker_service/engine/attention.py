"""Attention of packed tokens over KV in blocks, and the memory of the blocks. Whose blocks they are, kv.py knows.

There are two ways to the same numbers, up to rounding: the native kernels on a CPU, torch's own operations anywhere
else. What each layer asks for, probe.py has found out.
"""

import ctypes
import itertools
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.nn.functional import pad

from worker_service.engine import native
from worker_service.engine.block_plan import BlockPlan
from worker_service.engine.block_plan import QueryRange as QueryRange
from worker_service.engine.gathered import Group, Kept
from worker_service.engine.host_blocks import HostBlocks
from worker_service.engine.probe import LayerAsks, Options, check_options
from worker_service.engine.ragged import RaggedAttention
from worker_service.engine.shape import AttentionShape
from worker_service.engine.upload import Leaving, sent, sent_together

_handles = itertools.count()


class PagedAttention(ABC):
    """Keys and values of all requests of one model."""

    def __init__(self, data: Sequence[torch.Tensor], longest: int) -> None:
        """`data`: of each layer [2 (key, value), blocks, kv heads, block_tokens * dim]. `longest`: tokens of a text."""
        self._data, self._host = data, HostBlocks(data)
        self.longest = longest
        self.first = 0  # number of the layer that `data` begins with: a process may have some of a model's layers
        self.asked: Mapping[int, LayerAsks] = {}  # by the model, of each layer
        self._leaving: Leaving | None = None  # None: the copies of `save` are waited for
        self._handle = next(_handles)
        _instances[self._handle] = self

    def take_over(self, model: Any) -> None:
        """From now on every pass of this model of transformers attends here."""
        from transformers import AttentionInterface  # takes seconds, and not every model is one of its own

        name = f"laps_sd_{self._handle}"
        AttentionInterface.register(name, _attention_function(self._handle))
        model.set_attn_implementation(name)

    @abstractmethod
    def begin(self, ranges: Sequence[QueryRange], also: Sequence[Sequence[int]] = ()) -> list[torch.Tensor]:
        """Say whose the packed tokens of the next forward pass are; all its layers share this. Returns the integers of
        `also` in int64 on the device: so that all goes there together."""

    @abstractmethod
    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, options: Options
    ) -> torch.Tensor:
        """Write the new `key` and `value` [T, kv heads, dim] into their blocks, then attend over all up to each token.

        `query` and the result: [T, heads, dim]. `layer`: counted from `first` on.
        """

    @torch.inference_mode()
    def save(self, table: Sequence[int]) -> list[int]:
        """Copy these blocks to the host's memory; returns which blocks they are there."""
        saved = self._host.take(len(table))
        blocks = sent(torch.tensor(list(table), dtype=torch.long), self._data[0].device)
        for number, layer in enumerate(self._data):  # one at a time: the device's memory is short just now
            part = layer.transpose(0, 1)[blocks].contiguous()
            pieces = [(part[places], there) for places, there in self._host.pieces(saved, number)]
            if self._leaving:
                self._leaving.take(part, pieces)
                continue
            for own, there in pieces:
                there.copy_(own)
        return saved

    def restore(self, table: Sequence[int], saved: Sequence[int], first: int = 0) -> None:
        """Write what `save` has copied into these blocks, from its block number `first` on."""
        if self._leaving:
            self._leaving.wait()
        for number, layer in enumerate(self._data):
            for places, there in self._host.pieces(saved[first : first + len(table)], number):
                layer[:, list(table[places])] = there.to(layer.device).transpose(0, 1)

    def discard(self, saved: Sequence[int]) -> None:
        """Give up what `save` has copied."""
        self._host.give(saved)


_instances: WeakValueDictionary[int, PagedAttention] = WeakValueDictionary()


def paged_attention(
    shapes: Sequence[AttentionShape],
    longest: int,
    blocks: int,
    block_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    kind: str = "auto",
) -> PagedAttention:
    """Attention with memory for `blocks` blocks of `block_tokens` tokens each.

    `shapes`: of each layer; `longest`: tokens of a text. `kind`: auto (the native kernels on a CPU, else torch), torch,
    flashinfer, or graphs: torch, with a block more for tokens that are padding, and copies to the host beside passes.
    Raises NotImplementedError.
    """
    if kind == "auto" and device.type == "cpu" and NativeAttention.supports(shapes, block_tokens, dtype):
        return NativeAttention(shapes, longest, blocks, block_tokens, dtype)
    ragged = RaggedAttention(block_tokens, device, dtype) if kind == "flashinfer" else None
    made = TorchAttention(shapes, longest, blocks + (kind == "graphs"), block_tokens, device, dtype, ragged)
    made._leaving = Leaving(device) if kind == "graphs" and device.type == "cuda" else None
    return made


def _memory(shape: AttentionShape, blocks: int, block_tokens: int) -> tuple[int, int, int, int]:
    return 2, blocks, shape.kv_heads, block_tokens * shape.dim


class NativeAttention(PagedAttention):
    """kernels/attention.h, for a CPU."""

    @staticmethod
    def supports(shapes: Sequence[AttentionShape], block_tokens: int, dtype: torch.dtype) -> bool:
        fits = all(n % native.LANES == 0 for n in (block_tokens, *(shape.dim for shape in shapes)))
        return fits and dtype in native.TYPES and native.kernels() is not None

    def __init__(
        self, shapes: Sequence[AttentionShape], longest: int, blocks: int, block_tokens: int, dtype: torch.dtype
    ) -> None:
        super().__init__([native.empty(_memory(shape, blocks, block_tokens), dtype) for shape in shapes], longest)
        self.shapes, self.block_tokens, self.dtype = shapes, block_tokens, dtype
        pointer, integer, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
        self._kernel = native.function(
            "attention", dtype, pointer, pointer, integer, *[pointer] * 7, number, integer, number, pointer
        )
        self._sizes = [array("i", [*shape, block_tokens]) for shape in shapes]
        self.pointers = [(layer[0].data_ptr(), layer[1].data_ptr()) for layer in self._data]
        self.begin(())

    def begin(self, ranges: Sequence[QueryRange], also: Sequence[Sequence[int]] = ()) -> list[torch.Tensor]:
        self._ranges, self._tables = array("i"), array("i")
        for each in ranges:
            self._ranges.extend((each.begin, each.n, each.start, len(self._tables), each.source))
            self._tables.extend(each.table)
        self.ranges = self._ranges.buffer_info()[0], len(ranges), self._tables.buffer_info()[0]  # for the kernels
        return sent_together(also, torch.device("cpu"))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, options: Options
    ) -> torch.Tensor:
        heads, size = [tuple(x.shape[1:]) for x in (query, key, value)], self.shapes[layer]
        if heads != [(size.heads, size.dim), *[(size.kv_heads, size.dim)] * 2]:
            raise NotImplementedError(f"heads of sizes {heads}, where the configuration says {size}")
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        out = torch.empty_like(query)
        new = query.data_ptr(), key.data_ptr(), value.data_ptr()
        shape = self._sizes[layer].buffer_info()[0]
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        scores = options.scale, options.window, options.softcap, None if sinks is None else sinks.data_ptr()
        self._kernel(shape, *self.ranges, *new, *self.pointers[layer], out.data_ptr(), *scores)
        return out


class TorchAttention(PagedAttention):
    """For any device: blocks are gathered, for short query ranges of about the same past together and for each long one
    by itself; or read where they are, by kernels that can."""

    _SHORT = 16  # tokens

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        longest: int,
        blocks: int,
        block_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        ragged: RaggedAttention | None = None,
    ) -> None:
        if device.type == "cuda":  # of newer GPUs torch would ask cuDNN first, which makes a plan for every new shape
            torch.backends.cuda.enable_cudnn_sdp(False)
        sizes = [_memory(shape, blocks, block_tokens) for shape in shapes]
        self._alike = {size: torch.zeros(n, *size, device=device, dtype=dtype) for size, n in Counter(sizes).items()}
        layers = {size: iter(alike) for size, alike in self._alike.items()}
        data = [next(layers[size]) for size in sizes]
        super().__init__(data, longest)
        self._block_tokens, self._device, self._ragged = block_tokens, device, ragged
        self._copies: list[torch.Tensor] | None = None  # of this pass, as BlockPlan.copies has them
        self._layers = [
            layer.view(*layer.shape[:-1], block_tokens, shape.dim) for layer, shape in zip(data, shapes, strict=True)
        ]

    def begin(self, ranges: Sequence[QueryRange], also: Sequence[Sequence[int]] = ()) -> list[torch.Tensor]:
        plan = BlockPlan(ranges, self._block_tokens)
        if self._ragged:
            self._ragged.begin(plan)
        groups = [] if self._ragged else [plan.padded(group) for group in plan.groups(self._SHORT)]
        everything = [plan.begun(), *plan.places(), *plan.copies(), *itertools.chain(*groups), *also]
        begun, self._new_blocks, self._new_offsets, *others = sent_together(everything, self._device)
        self.clear(begun)
        copies, others = others[:3], others[3:]
        self._copies = copies if len(copies[0]) else None
        kept = Kept()
        self._groups = [Group(others[3 * i : 3 * i + 3], self._block_tokens, kept) for i in range(len(groups))]
        return others[3 * len(groups) :]

    def clear(self, blocks: torch.Tensor) -> None:
        """Before a pass that begins these and does not fill them. What masks hide is multiplied by 0, so it must be
        finite, and the text before may have left anything."""
        if len(blocks):
            for layers in self._alike.values():
                layers.index_fill_(2, blocks, 0)

    def begin_padded(
        self, blocks: torch.Tensor, offsets: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, requests: int
    ) -> torch.Tensor:
        """As `begin`, of numbers that are on the device: as many tokens and blocks for each request, and no sources;
        what is begun was cleared. Returns the numbers of all tokens."""
        self._new_blocks, self._new_offsets, self._copies = blocks, offsets, None
        every = torch.arange(len(blocks), device=self._device)
        numbers = [x.view(requests, -1) for x in (every, positions, tables)]
        self._groups = [Group(numbers, self._block_tokens, Kept())]
        return every

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, options: Options
    ) -> torch.Tensor:
        keys, values = self._layers[layer]
        keys[self._new_blocks, :, self._new_offsets] = key
        values[self._new_blocks, :, self._new_offsets] = value
        if self._copies:
            source, to, places = self._copies
            self._layers[layer][:, to, :, places] = self._layers[layer][:, source, :, places]
        if self._ragged:
            return self._ragged(query, keys, values, options)
        # Query heads that share a KV head are queries of it: so that it is read once.
        query = query.view(len(query), keys.shape[1], -1, query.shape[-1])
        out = torch.empty_like(query)
        for group in self._groups:
            group.attend(query, keys, values, options, out)
        return out.flatten(1, 2)


def _attention_function(handle: int) -> Callable[..., tuple[torch.Tensor, None]]:
    """What transformers calls in each layer. It does not keep its PagedAttention alive: the registry would, forever."""

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,  # [1, heads, T, dim]
        key: torch.Tensor,  # [1, kv heads, T, dim]
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,  # None: this attention has no mask function, it knows the window
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        own = _instances[handle]
        layer: int = module.layer_idx  # type: ignore[assignment]
        window = own.asked[layer].window
        check_options(layer, window, own.longest, others)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        # Values may be shorter than keys: they are filled up with zeros.
        short = k.shape[-1] - v.shape[-1]
        options = Options(scale, window, softcap or 0.0, s_aux)
        out = own.attend(q, k, pad(v, (0, short)) if short else v, layer - own.first, options)
        return out[None, ..., : v.shape[-1]], None

    return attention
