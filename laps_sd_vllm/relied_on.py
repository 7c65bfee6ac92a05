"""Checks of vLLM when the scheduler and the worker's engine are made: that it has all that they take for granted, and
nothing that they were never tried with. Else it refuses to start. Nothing is changed here."""

from typing import Any

import vllm
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs
from vllm.v1.request import Request

from laps_sd_vllm import versions
from laps_sd_vllm.versions import Unsupported

ATTRIBUTES = (
    "running", "waiting", "kv_holding_waiting", "requests", "kv_cache_manager", "policy", "num_spec_tokens", "use_pp",
    "use_v2_model_runner", "max_num_running_reqs", "max_num_active_reqs", "current_step", "block_size", "vllm_config",
    "kv_cache_config", "max_num_scheduled_tokens", "max_model_len", "pause_state", "is_encoder_decoder", "lora_config",
    "connector", "ec_connector",
)  # fmt: skip
METHODS = (
    "_preempt_request", "_free_request", "_update_request_with_output", "_is_blocked_waiting_status",
    "_handle_blocked_waiting_request", "make_spec_decoding_stats", "update_from_output", "get_request_counts",
    "schedule", "add_request", "finish_requests", "shutdown",
)  # fmt: skip
# `schedule` asks each running request from which step on it may decode, and takes KV from the last running one.
READ_BY_SCHEDULE = ("next_decode_eligible_step", "current_step", "max_num_active_reqs", "kv_holding_waiting", "running")
REQUEST = (
    "request_id", "status", "stop_reason", "arrival_time", "priority", "cache_salt", "sampling_params", "resumable",
    "max_tokens", "prompt_token_ids", "output_token_ids", "spec_token_ids", "num_prompt_tokens", "num_output_tokens",
    "num_tokens", "num_tokens_with_spec", "num_computed_tokens", "num_output_placeholders", "num_stale_output_tokens",
    "next_decode_eligible_step", "is_finished",
)  # fmt: skip
ENGINE = (
    "scheduler", "step_fn", "post_step", "batch_queue", "preprocess_add_request", "add_request", "abort_requests",
    "shutdown",
)  # fmt: skip
GROUPS = (FullAttentionSpec, SlidingWindowSpec)  # kinds of attention whose KV stays while a request is not scheduled


def check(scheduler: Any, most_groups: int | None) -> None:
    """`most_groups`: of KV blocks; None: the scheduler only reports. Raises Unsupported: this vLLM, model or option is
    none that was tried."""
    versions.check(vllm.__version__)
    missing = [name for name in (*ATTRIBUTES, *METHODS) if not hasattr(scheduler, name)]
    read = Scheduler.schedule.__code__.co_names
    missing += [name for name in READ_BY_SCHEDULE if name not in read]
    _refuse("scheduler", missing)
    of_request = Request.__init__.__code__.co_names  # what it sets
    _refuse("request", [name for name in REQUEST if name not in of_request and not hasattr(Request, name)])
    if scheduler.vllm_config.diffusion_config is not None:
        raise Unsupported("LAPS-SD takes the place of the scheduler that vLLM has for this diffusion model")
    if most_groups is not None and (reason := _refusal(scheduler, most_groups)):
        raise Unsupported(f"LAPS-SD cannot order this vLLM: {reason}")


def check_engine(core: Any) -> None:
    """Of vLLM's EngineCore, which a worker steps itself. Raises Unsupported."""
    _refuse("engine", [name for name in ENGINE if not hasattr(core, name)])


def _refuse(what: str, missing: list[str]) -> None:
    if missing:
        raise Unsupported(f"this vLLM {vllm.__version__} is not as it was released: its {what} lacks {missing[0]}")


def _refusal(scheduler: Any, most_groups: int) -> str:
    """Empty: there is none."""
    config = scheduler.vllm_config
    if scheduler.policy is not SchedulingPolicy.FCFS:
        return "--scheduling-policy must be fcfs, since the order is LAPS-SD's business"
    if scheduler.max_num_active_reqs < scheduler.max_num_running_reqs:
        return "--max-num-active-seqs must not be below --max-num-seqs, since slots bounds who runs"
    if getattr(config.scheduler_config, "prefill_schedule_interval", 1) > 1:  # it looks as if there were no memory
        return "--prefill-schedule-interval must be 1"
    if scheduler.kv_cache_manager.watermark_blocks:  # free blocks that vLLM gives to nobody who waits
        return "--watermark must be 0"
    if config.model_config.runner_type == "pooling":
        return "a pooling model has no steps to order"
    if scheduler.is_encoder_decoder:
        return "encoder-decoder models were not tried"
    if scheduler.lora_config is not None:
        return "paused requests would hold their LoRA adapter's place"
    if scheduler.use_pp and most_groups > 1:  # of a plug-in: its core knows one batch at a time
        return "pipeline parallelism was not tried"
    if scheduler.connector is not None or scheduler.ec_connector is not None:
        return "KV connectors were not tried"
    if getattr(scheduler, "num_sampled_tokens_per_step", 1) != 1:
        return "diffusion models were not tried"
    groups = scheduler.kv_cache_config.kv_cache_groups
    for spec in [each for group in groups for each in _layers(group.kv_cache_spec)]:
        if not isinstance(spec, GROUPS):
            return f"a model with {type(spec).__name__.removesuffix('Spec')} layers was not tried"
        if getattr(spec, "non_causal", False):  # its prompts cannot be computed in parts, nor output as a prompt
            return "a model whose attention is not causal was not tried"
    if len(groups) > most_groups:
        return f"the model has {len(groups)} kinds of KV blocks, and here {most_groups} is supported"
    return ""


def _layers(spec: Any) -> list[Any]:
    """The kinds of KV in one group."""
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
