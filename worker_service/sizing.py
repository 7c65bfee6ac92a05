"""How large the steps of a GPU are where nobody says, and how much KV it gets: what weights and the largest step leave.
That step is rehearsed, at the end of the longest texts."""

from array import array
from pathlib import Path

import torch

from worker_service.capacity import check_kv_tokens, drafter_memory, free_bytes, summary
from worker_service.config import Settings
from worker_service.engine.hooks import HOOKS, LogitsContext
from worker_service.engine.kv import KV, BlockPool
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
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model of its own kind does in a pass
        name = type(model.model).__name__
        raise ModelError(f"{settings.model}: the engine cannot serve this {name}: {summary(error)}") from error
    torch.cuda.empty_cache()  # of what the rehearsals have taken
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
        torch.cuda.empty_cache()  # of what the rehearsal before has taken
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
    """Bytes that the largest step takes. The model is left as it was."""
    own, head = model.model.config._attn_implementation, model.model.get_output_embeddings()
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    # No text is longer, and all together are not either: attention takes time and memory by their lengths.
    room = torch.cuda.mem_get_info(model.device)[0] // _kv_bytes(model)
    longest = max(min(model.context_tokens, room), 2)
    drafts, prefill = settings.most_drafts, min(settings.max_prefill, longest - 1)
    ends = [longest, *[min(longest, max(room // settings.slots, drafts + 1))] * settings.slots]
    sizes = [(prefill, 1), *[(drafts + 1, drafts + 1)] * settings.slots]  # tokens, and those with logits
    try:
        target = Target(model.model)
        pool = target.new_pool(1, settings.block_tokens, settings.attention)
        passed = target.forward([_sequence(pool, end, *each) for end, each in zip(ends, sizes, strict=True)])
        asked = [LogitsContext([0], [0] * (n - 1), 0, _DEAREST, Limits(1), frozenset()) for _, n in sizes]
        Sampler(HOOKS).draw(passed.logits, asked)
        return int(torch.cuda.max_memory_allocated(model.device)) - before
    finally:
        model.model.set_attn_implementation(own)
        model.model.set_output_embeddings(head)


def _sequence(pool: BlockPool, end: int, tokens: int, num_logits: int) -> InputSequence:
    """The last tokens of a text that is all in one block, over and over: what is computed is not looked at."""
    kv, start = KV(pool), max(end - tokens, 0)
    kv.table = array("i", [0]) * -(-(start + tokens) // pool.block_tokens)
    return InputSequence(kv, start, [0] * tokens, tokens - num_logits)


def _kv_bytes(model: LoadedModel) -> int:
    """Of a token."""
    return kv_values_per_token(attention_shapes(model.model.config)) * model.dtype.itemsize
