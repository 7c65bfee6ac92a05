"""How large the steps of a GPU are where nobody says, and how much KV it gets: what weights and the largest step leave.
That step is rehearsed, at the end of the longest texts."""

import gc
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from worker_service.capacity import check_kv_tokens, drafter_memory, free_bytes, summary
from worker_service.config import Settings
from worker_service.engine.graphs import KEPT, MOST_EACH, MOST_TOKENS
from worker_service.engine.hooks import HOOKS, LogitsContext
from worker_service.engine.kv import KV, BlockPool
from worker_service.engine.planning import SCORED
from worker_service.engine.sampler import Sampler
from worker_service.engine.shape import attention_shapes, kv_values_per_token
from worker_service.engine.target import InputSequence, Target
from worker_service.engine.types import Limits, Sampling
from worker_service.model_files import ModelError
from worker_service.models import LoadedModel

_SPARE = 0.1  # of all memory: for what others take, and allocators between their blocks
_SIZES = ((64, 4096), (32, 2048), (16, 1024), (4, 1024))  # of a step: requests, and tokens of prompts
_STEP = 0.1  # of the memory that weights leave, that the largest step may take
_DEAREST = Sampling(temperature=1.0, top_k=1000, top_p=0.5, logprobs=20)


def by_device(settings: Settings, device: torch.device, processes: int) -> bool:
    """Whether KV is sized so: of a model whole on one GPU, where `kv_tokens` is not said."""
    return device.type == "cuda" and processes == 1 and "kv_tokens" not in settings.model_fields_set


def sized(settings: Settings, model: LoadedModel) -> Settings:
    """The settings with `kv_tokens` and, unless they are said, `host_kv_tokens`, at most half of the host's memory, and
    `slots` and `max_prefill`, the largest whose step is no burden. Raises ModelError where not one request fits, or the
    engine cannot compute what the model does."""
    drafter = drafter_memory(Path(settings.drafter).expanduser(), model.dtype)
    a_token = _kv_bytes(model)
    try:
        settings, taken = _largest_step(settings, model)
        if settings.attention == "graphs":
            taken += _of_graphs(settings, model)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model of its own kind does in a pass
        name = type(model.model).__name__
        raise ModelError(f"{settings.model}: the engine cannot serve this {name}: {summary(error)}") from error
    _give_back()
    free, total = torch.cuda.mem_get_info(model.device)
    left = free - taken - int(_SPARE * total) - drafter.weights
    tokens = max(left // (a_token + drafter.a_token), 0)
    check_kv_tokens(tokens, model.context_tokens)
    host = free_bytes(torch.device("cpu"))
    offloaded = tokens if host is None else min(tokens, host // 2 // a_token)
    if settings.host_kv_tokens is not None:
        offloaded = settings.host_kv_tokens
    return settings.model_copy(update={"kv_tokens": tokens, "host_kv_tokens": offloaded})


def _largest_step(settings: Settings, model: LoadedModel) -> tuple[Settings, int]:
    """The settings with the sizes of a step, and the bytes that such a one takes at most beside the weights."""
    told = {name: getattr(settings, name) for name in ("slots", "max_prefill") if name in settings.model_fields_set}
    for slots, prefill in _SIZES:
        chosen = settings.model_copy(update={"slots": slots, "max_prefill": prefill} | told)
        least = (slots, prefill) == _SIZES[-1]
        _give_back()
        left = torch.cuda.mem_get_info(model.device)[0]
        try:
            taken = _rehearsed(chosen, model)
        except torch.OutOfMemoryError:
            if least:
                raise
        else:
            if least or taken <= _STEP * left:
                break
    return chosen, taken


@torch.inference_mode()
def _rehearsed(settings: Settings, model: LoadedModel) -> int:
    """Bytes that the largest step takes."""
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    drafts, (longest, other) = settings.most_drafts, _ends(settings, model)
    prefill = min(settings.max_prefill, longest - 1)
    # Tokens, and those with logits: of a prompt also those whose log-probabilities are told.
    sizes = [(prefill, min(prefill, SCORED + 1)), *[(drafts + 1, drafts + 1)] * settings.slots]
    with _target(settings, model) as (target, pool):
        ends = [longest, *[other] * settings.slots]
        passed = target.forward([_sequence(pool, end, *each) for end, each in zip(ends, sizes, strict=True)])
        asked = [LogitsContext([0], [0] * (n - 1), 0, _DEAREST, Limits(1), frozenset()) for _, n in sizes]
        Sampler(HOOKS).draw(passed.logits, asked)
        return int(torch.cuda.max_memory_allocated(model.device)) - before


@torch.inference_mode()
def _of_graphs(settings: Settings, model: LoadedModel) -> int:
    """Bytes that all graphs take: the first one with what they share, the others each as much as a second one. What a
    driver keeps of a graph torch does not know."""
    requests = min(settings.slots, MOST_TOKENS)
    padded = 1 << (requests - 1).bit_length()
    tokens = min(settings.most_drafts + 1, MOST_EACH, MOST_TOKENS // padded)
    end = _ends(settings, model)[1]
    free = []
    with _target(settings, model) as (target, pool):
        for each in (0, end, end // 2):
            if each:
                target.forward([_sequence(pool, each, tokens, tokens)] * requests)
            _give_back()
            free.append(torch.cuda.mem_get_info(model.device)[0])
    first, another = free[0] - free[1], free[1] - free[2]
    return max(first, 0) + (KEPT - 1) * max(another, 0)


def _ends(settings: Settings, model: LoadedModel) -> tuple[int, int]:
    """How long a text may be, and one of as many as run at once. All together are no longer than what fits into memory:
    attention takes time and memory by their lengths."""
    room = torch.cuda.mem_get_info(model.device)[0] // _kv_bytes(model)
    longest = max(min(model.context_tokens, room), 2)
    return longest, min(longest, max(room // settings.slots, settings.most_drafts + 1))


@contextmanager
def _target(settings: Settings, model: LoadedModel) -> Iterator[tuple[Target, BlockPool]]:
    """With a pool of one block. The model is left as it was."""
    own, head = model.model.config._attn_implementation, model.model.get_output_embeddings()
    try:
        target = Target(model.model)
        yield target, target.new_pool(1, settings.block_tokens, settings.attention)
    finally:
        model.model.set_attn_implementation(own)
        model.model.set_output_embeddings(head)


def _give_back() -> None:
    """To the device: what rehearsals have taken, and its targets, which know their graphs and these them."""
    gc.collect()
    torch.cuda.empty_cache()


def _sequence(pool: BlockPool, end: int, tokens: int, num_logits: int) -> InputSequence:
    """The last tokens of a text that is all in one block, over and over: what is computed is not looked at."""
    kv, start = KV(pool), max(end - tokens, 0)
    kv.table = array("i", [0]) * -(-(start + tokens) // pool.block_tokens)
    return InputSequence(kv, start, [0] * tokens, tokens - num_logits)


def _kv_bytes(model: LoadedModel) -> int:
    """Of a token."""
    return kv_values_per_token(attention_shapes(model.model.config)) * model.dtype.itemsize
