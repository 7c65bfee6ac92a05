"""The model as vLLM is configured for it, before anything is loaded: what it cannot serve here is one sentence. The
engine itself is engine.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm
from transformers import AutoTokenizer
from vllm.config import CompilationMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from worker_service.identity import fingerprint, model_name
from worker_service.model_files import ModelError, check_files, end_ids
from worker_service.vllm_engine import promises
from worker_service.vllm_engine.config import CPU_KV_TOKENS, Settings


@dataclass(frozen=True, slots=True)
class ServedModel:
    """As `identity.Described`, and what of this service's promises its engine does not keep."""

    tokenizer: Any
    name: str
    fingerprint: str
    eos_ids: frozenset[int]
    refused: Mapping[str, str] = field(default_factory=dict)
    caveats: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Configured:
    """`max_draft`: tokens that vLLM drafts for a request in a step; 0: it does not speculate. `about`: for the log."""

    config: VllmConfig
    model: ServedModel
    max_draft: int
    about: Mapping[str, str]


def configure(settings: Settings) -> Configured:
    """Raises ModelError for a model or options that vLLM or this worker cannot serve."""
    folder = Path(settings.model)
    check_files(folder)
    try:
        config = EngineArgs(**settings.engine_args()).create_engine_config(UsageContext.ENGINE_CONTEXT)
        trusted = config.model_config.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trusted)
    except (ValueError, TypeError, OSError, RuntimeError, NotImplementedError, ImportError) as error:
        raise ModelError(f"{folder}: vLLM cannot serve it: {_sentence(error)}") from error
    if problem := _problem(config, tokenizer, settings):
        raise ModelError(f"{folder}: {problem}")
    _limit_kv(config, settings)
    speculation = config.speculative_config
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    max_draft = int(speculation.num_speculative_tokens) if speculation else 0
    model = ServedModel(
        tokenizer,
        model_name(folder),
        fingerprint(folder, settings.weights_kind),
        _eos_ids(config, tokenizer),
        promises.refused(speculating=bool(max_draft)),
        promises.caveats(speculating=bool(max_draft), dtype=dtype),
    )
    about = {"dtype": dtype, "device": str(config.device_config.device_type), "vllm": vllm.__version__}
    return Configured(config, model, max_draft, about)


def _limit_kv(config: VllmConfig, settings: Settings) -> None:
    """Room for exactly `kv_tokens`, and bytes for that, so that vLLM does not look for more. Raises ModelError if one
    request may need more."""
    cache, tokens = config.cache_config, settings.kv_tokens
    if tokens is None:
        if config.device_config.device_type != "cpu" or cache.kv_cache_memory_bytes or cache.num_gpu_blocks_override:
            return
        tokens = CPU_KV_TOKENS
    cache.num_gpu_blocks_override = -(-tokens // cache.block_size) + 1  # vLLM leaves one empty
    asked, fits = settings.vllm_args.get("max_model_len", -1), -(-tokens // cache.block_size) * cache.block_size
    if isinstance(asked, int) and asked > fits and config.model_config.get_sliding_window() is None:
        raise ModelError(f"vllm_args: max_model_len {asked} is more than the {fits} tokens of --kv-tokens")
    speculation = config.speculative_config
    drafter = speculation.draft_model_config if speculation and speculation.uses_draft_model() else None
    token_bytes = sum(_token_bytes(model, config) for model in (config.model_config, drafter) if model is not None)
    cache.kv_cache_memory_bytes = cache.num_gpu_blocks_override * cache.block_size * token_bytes


def _token_bytes(model: Any, config: VllmConfig) -> int:
    """Of the keys and values of one token, on one device."""
    layers, heads = model.get_num_layers(config.parallel_config), model.get_num_kv_heads(config.parallel_config)
    return int(2 * layers * heads * model.get_head_size() * model.dtype.itemsize)


def _problem(config: VllmConfig, tokenizer: Any, settings: Settings) -> str:
    """Why this worker cannot serve what vLLM could; empty if it can."""
    model = config.model_config
    if model.runner_type != "generate" or model.is_encoder_decoder:
        return "it generates no text from text alone"
    if config.parallel_config.data_parallel_size > 1:
        return "data_parallel_size: start a worker for each replica instead (--workers)"
    if config.parallel_config.pipeline_parallel_size > 1 and config.device_config.device_type == "cpu":
        warm = config.compilation_config.mode != CompilationMode.NONE  # else vLLM leaves out what readies a stage
        if not warm and "worker_cls" not in settings.vllm_args:
            return "pipeline_parallel_size: on a CPU vLLM's stages fail with enforce_eager; leave that out"
    if not getattr(tokenizer, "is_fast", False):
        return "its tokenizer has no fast form (tokenizer.json)"
    return ""


def _eos_ids(config: VllmConfig, tokenizer: Any) -> frozenset[int]:
    """Raises ModelError."""
    model = config.model_config
    generation = model.try_get_generation_config()
    own = getattr(model.hf_text_config, "eos_token_id", None)
    return end_ids((generation.get("eos_token_id"), own, tokenizer.eos_token_id), model.get_vocab_size())


def _sentence(error: BaseException) -> str:
    """Of an error that may go on for pages: pydantic's first problem, or the first line."""
    if (errors := getattr(error, "errors", None)) is not None:
        return str(errors()[0]["msg"]).removeprefix("Value error, ").splitlines()[0]
    return (str(error).splitlines() or [type(error).__name__])[0]
