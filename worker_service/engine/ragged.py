"""Attention by FlashInfer's kernels: over blocks where they lie, without gathering or padding. For a GPU, in 16 bits.

No GPU has run this yet, so only who asks for it gets it (`--attention flashinfer`).
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from worker_service.engine.block_plan import BlockPlan
from worker_service.engine.probe import Options

_WORKSPACE_BYTES = 128 << 20  # as FlashInfer's documentation advises


def problem(device: torch.device, dtype: torch.dtype) -> str:
    """Why these kernels cannot be used here; empty if they can."""
    if device.type != "cuda":
        return f"flashinfer is for a GPU, and the device is {device}"
    if dtype.itemsize != 2:
        return f"flashinfer computes in 16 bits, not in {str(dtype).removeprefix('torch.')}"
    if find_spec("flashinfer") is None:
        return "flashinfer is not installed: it comes with the package flashinfer-python"
    return ""


class RaggedAttention:
    """One call for all query ranges of a pass. Layers that attend alike share a plan."""

    def __init__(self, block_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        """Raises NotImplementedError where it is not possible."""
        if why := problem(device, dtype):
            raise NotImplementedError(why)
        self._wrapper: Any = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._block_tokens, self._dtype = block_tokens, dtype
        self._made: dict[Any, Any] = {}  # wrappers, by how layers attend
        self._planned: set[Any] = set()  # those that know of this pass
        self._arrays: tuple[torch.Tensor, ...] = ()

    def begin(self, plan: BlockPlan) -> None:
        """Of the next pass. The arrays stay on the host: FlashInfer reads them there, and sends them itself."""
        arrays = plan.first_tokens, plan.offsets, plan.indices, plan.last_block_tokens
        self._arrays = tuple(map(torch.from_numpy, arrays))
        self._planned.clear()

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: Options) -> torch.Tensor:
        """`query` and the result [T, heads, dim]; `keys` and `values` [blocks, kv heads, block tokens, dim]. The tokens
        of a range are the last ones of its text. Raises NotImplementedError."""
        if options.sinks is not None:
            raise NotImplementedError("attention with sinks is not among those that --attention flashinfer knows")
        heads, kv_heads, dim = query.shape[1], keys.shape[1], keys.shape[3]
        key = heads, kv_heads, dim, options[:3]
        if key not in self._made:
            self._made[key] = self._wrapper(self._workspace, "HND")
        if key not in self._planned:
            self._made[key].plan(
                *self._arrays,
                heads,
                kv_heads,
                dim,
                self._block_tokens,
                causal=True,
                sm_scale=options.scale,
                window_left=options.window - 1,  # it does not count the token itself; -1: all
                logits_soft_cap=options.softcap,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )
            self._planned.add(key)
        result: torch.Tensor = self._made[key].run(query.contiguous(), (keys, values))
        return result
