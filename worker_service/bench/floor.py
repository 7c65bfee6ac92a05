"""The floor under a decode step: what this machine's memory and arithmetic allow, both measured. No engine here."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from worker_service.engine.shape import attention_shapes, kv_values_per_token

_TRIALS = 30


@dataclass(frozen=True, slots=True)
class Machine:
    bytes_per_s: float  # memory read
    operations_per_s: float  # of a matrix product in the model's dtype

    def or_better(self, other: "Machine") -> "Machine":
        """The best of both measurements: a busy machine only ever makes them worse."""
        return Machine(max(self.bytes_per_s, other.bytes_per_s), max(self.operations_per_s, other.operations_per_s))


@dataclass(frozen=True, slots=True)
class Work:
    """What one model needs of a machine."""

    weights: int  # how many enter products; an embedding table that is only looked up does not count
    weight_bytes: int
    kv_bytes: int  # of one token, in all layers
    attention_operations: int  # of a query token for each token that it sees, in all layers


def measure(device: torch.device, dtype: torch.dtype) -> Machine:
    """The best of some trials each: a sum over memory that no cache holds, and a product of square matrices."""
    cuda = device.type == "cuda"
    memory = torch.ones(1 << (30 if cuda else 26), device=device)
    size = 8192 if cuda else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    read_s = _best(lambda: memory.sum(), device)
    product_s = _best(lambda: a @ b, device)
    return Machine(memory.nbytes / read_s, 2 * size**3 / product_s)


def _best(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_TRIALS):
        begun = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - begun)
    return min(times)


def work_of(model: Any, served: Any = None) -> Work:
    """`model`: a causal LM of the transformers library; `served`: the
    one that our engine gets, before it does, if that is another one; its weights may be of few bits."""
    parameters = {id(p): p for p in model.parameters()}
    if model.get_input_embeddings().weight is not model.get_output_embeddings().weight:
        del parameters[id(model.get_input_embeddings().weight)]
    weights = sum(p.numel() for p in parameters.values())
    shapes, itemsize = attention_shapes(model.config), model.dtype.itemsize
    packed = {id(part.packed): part.packed for part in (served or model).modules() if hasattr(part, "packed")}.values()
    rest = weights - sum(each.outputs * each.inputs for each in packed)
    return Work(
        weights=weights,
        weight_bytes=rest * itemsize + sum(each.nbytes for each in packed),
        kv_bytes=kv_values_per_token(shapes) * itemsize,
        attention_operations=4 * sum(shape.heads * shape.dim for shape in shapes),
    )


def floor_s(machine: Machine, work: Work, requests: float, tokens: float, context: float) -> float:
    """Seconds of a step that computes `tokens` in all, of `requests` that hold `context` tokens each.

    Bytes: the weights once, and the KV of each request once; operations: two a weight and token, and attention's.
    """
    moved = work.weight_bytes + requests * context * work.kv_bytes
    computed = tokens * (2 * work.weights + context * work.attention_operations)
    return max(moved / machine.bytes_per_s, computed / machine.operations_per_s)
