"""How large the steps of a GPU are where nobody says, and how much KV it gets: what weights and the largest step leave.
That step is rehearsed."""

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
    shapes, size = attention_shapes(model.model.config), model.dtype.itemsize
    a_token = kv_values_per_token(shapes) * size
    # Attention that gathers has one layer's keys and values up to three times more, padding included.
    gathered = 3 * max(shape.kv_values_per_token for shape in shapes) * size
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
    tokens = max(left // (a_token + gathered + drafter.a_token), 0)
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
    drafts, prefill = settings.most_drafts, min(settings.max_prefill, model.context_tokens - 1)
    sizes = [(prefill, 1), *[(drafts + 1, drafts + 1)] * settings.slots]  # tokens, and those with logits
    blocks = sum(-(-tokens // settings.block_tokens) for tokens, _ in sizes)
    try:
        target = Target(model.model)
        pool = target.new_pool(blocks, settings.block_tokens, settings.attention)
        passed = target.forward([_sequence(pool, *each) for each in sizes])
        asked = [LogitsContext([0], [0] * (n - 1), 0, _DEAREST, Limits(1), frozenset()) for _, n in sizes]
        Sampler(HOOKS).draw(passed.logits, asked)
        return int(torch.cuda.max_memory_allocated(model.device)) - before
    finally:
        model.model.set_attn_implementation(own)
        model.model.set_output_embeddings(head)


def _sequence(pool: BlockPool, tokens: int, num_logits: int) -> InputSequence:
    kv = KV(pool)
    kv.extend(tokens)
    return InputSequence(kv, 0, [0] * tokens, tokens - num_logits)
