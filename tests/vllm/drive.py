"""vLLM's own EngineCore in this process, stepped by hand. No assertions live here."""

import os
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# One thread: vLLM binds those of processes of its own only, and two wait for each other. Numba, which makes n-gram
# drafts, would raise the number to that of the cores with the first draft.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

MODEL = Path(os.environ.get("LAPS_SD_MODEL", Path.home() / ".cache/laps-sd/models/smollm2-135m"))


def make_core(
    scheduler_cls: Any = None,
    *,
    blocks: int | None = None,
    asynchronous: bool = False,
    v2: bool | None = None,
    **arguments: Any,
) -> Any:
    """`asynchronous` and `v2` are set behind vLLM's back: its CPU platform allows neither with a model."""
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    vllms_own = _own_choice_of_runner()
    given: dict[str, Any] = {
        "model": str(MODEL),
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "seed": 0,
        "skip_tokenizer_init": True,
    }
    # While the configuration is checked; an earlier engine may have left another.
    VllmConfig.use_v2_model_runner = vllms_own if v2 is None else property(lambda self: False)
    if dispatcher._registry:  # of an earlier engine: vLLM would search again, and stumble over llvmlite
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    args = EngineArgs(**(given | arguments), scheduler_cls=scheduler_cls, num_gpu_blocks_override=blocks)
    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    if asynchronous:
        config.scheduler_config.async_scheduling = True
    if v2 is not None:
        VllmConfig.use_v2_model_runner = property(lambda self: v2)
    return EngineCore(config, Executor.get_class(config), False)


@cache
def _own_choice_of_runner() -> Any:
    """To be asked before it is set to another."""
    from vllm.config import VllmConfig

    return VllmConfig.use_v2_model_runner


def add(
    core: Any,
    id: str,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    arrival: float | None = None,
    salt: str | None = None,
    priority: int = 0,
    **sampling: Any,
) -> None:
    """A request without an end of its own, greedy unless `sampling` says otherwise."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    given = {"temperature": 0.0, "ignore_eos": True, "detokenize": False} | sampling
    params = SamplingParams(max_tokens=max_tokens, **given)
    request = EngineCoreRequest(
        request_id=id,
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time() if arrival is None else arrival,
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=None,
        priority=priority,
    )
    core.add_request(*core.preprocess_add_request(request))


def step(core: Any) -> dict[str, tuple[list[int], bool]]:
    """Tokens, and whether it has ended, of each request with output; nothing where a step was only begun."""
    outputs, executed = core.step_fn()
    core.post_step(executed)
    told = [output for each in (outputs or {}).values() for output in each.outputs]
    return {each.request_id: (list(each.new_token_ids), each.finish_reason is not None) for each in told}


def run_all(core: Any) -> dict[str, list[int]]:
    """Every live request to its end, and what is left of the steps after it."""
    texts: dict[str, list[int]] = {}
    while core.scheduler.has_requests() or core.batch_queue:
        for id, (tokens, _) in step(core).items():
            texts.setdefault(id, []).extend(tokens)
    return texts
