"""The settings of a worker whose engine is vLLM: environment `LAPS_SD_WORKER_*` and command line. vLLM is not imported
here, so that `laps-sd up` can check them in another environment."""

import json
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from protos.bounds import KvTokens
from worker_service.config import CommonSettings

CPU_KV_TOKENS = 32_768  # vLLM would take nearly all of the machine's memory
# Arguments that the worker sets itself, and by what it can be changed.
OWN_ARGS = {
    "model": "--model",
    "dtype": "--dtype",
    "scheduler_cls": "nothing: the scheduler is ours",
    "scheduling_policy": "the scheduler's --policy",
    "skip_tokenizer_init": "nothing: the gateway has the tokenizer",
    "tokenizer": "nothing: the gateway has the model's own",
    "data_parallel_size": "--workers: a worker for each replica",
}
_OTHER_MODEL = ("hf_overrides", "load_format", "quantization", "quantization_config")  # they make one of the same files
# All these read the model's safetensors as they are, each its own way.
_SAME_WEIGHTS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
_KV_ARGS = ("kv_cache_memory_bytes", "num_gpu_blocks_override")


class Settings(CommonSettings):
    """A worker of LAPS-SD whose engine is vLLM, in an environment where vLLM is installed."""

    model_config = SettingsConfigDict(cli_prog_name="python -m worker_service.vllm_engine")

    kv_tokens: KvTokens | None = Field(
        None, description=f"tokens in KV memory; default: {CPU_KV_TOKENS} on a CPU, on a GPU what vLLM finds room for"
    )
    drafter: str = Field("default", description="none, ngram, default (ngram), or the directory of a small causal LM")
    threads: int = Field(0, ge=0, description="CPU threads of the model; 0: all cores. Of no effect on a GPU")
    vllm_args: dict[str, Any] = Field(
        default_factory=dict, description='JSON for EngineArgs of vLLM: {"tensor_parallel_size": 2, ...}'
    )

    @model_validator(mode="after")
    def _args_are_for_vllm(self) -> Self:
        if own := next((name for name in self.vllm_args if name in OWN_ARGS), None):
            raise ValueError(f"vllm_args: {own} is set by {OWN_ARGS[own]}")
        said = {name: value for name, value in self.vllm_args.items() if value is not None}
        if "speculative_config" in said and self.drafter != "default":
            raise ValueError("vllm_args: speculative_config and --drafter say the same; leave one of them out")
        drafts = self.engine_args().get("speculative_config") is not None
        if drafts and said.get("pipeline_parallel_size", 1) != 1:
            raise ValueError("vllm_args: pipeline_parallel_size needs --drafter none: vLLM drafts in no pipeline")
        if self.kv_tokens is not None and (same := next((name for name in _KV_ARGS if name in said), None)):
            raise ValueError(f"vllm_args: {same} and --kv-tokens say the same; leave one of them out")
        if self.drafter.startswith("remote:"):
            raise ValueError("drafter: vLLM drafts itself, not elsewhere; give ngram or a small model")
        if (Path(self.drafter) / "head.json").is_file():
            raise ValueError("drafter: our draft heads do not run in vLLM; give a small model")
        seats = said.get("max_num_seqs", self.slots)
        if not isinstance(seats, int) or seats < self.slots:
            raise ValueError(f"vllm_args: max_num_seqs must be a number, at least the {self.slots} slots")
        return self

    def engine_args(self) -> dict[str, Any]:
        """For vLLM's EngineArgs. Paused requests keep a seat of `max_num_seqs` beside those that run."""
        own: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "scheduler_cls": "laps_sd_vllm.directed.DirectedScheduler",
            "skip_tokenizer_init": True,
            "max_num_seqs": max(4 * self.slots, 16),
            "long_prefill_token_threshold_adaptive": False,  # what a command allows is a bound
            "max_model_len": -1,  # as much of the model's context as KV memory holds
        }
        if self.vllm_args.get("speculative_config") is None and (speculation := self._speculation()):
            own["speculative_config"] = speculation
        # A null says nothing: it is not vLLM's default instead of ours.
        return own | {name: value for name, value in self.vllm_args.items() if name not in own or value is not None}

    @property
    def weights_kind(self) -> str:
        said = {name: self.vllm_args.get(name) for name in _OTHER_MODEL}
        other = {name: value for name, value in said.items() if value and value not in _SAME_WEIGHTS}
        return json.dumps(other, sort_keys=True) if other else super().weights_kind

    def _speculation(self) -> dict[str, Any]:
        if self.drafter == "none" or not self.max_draft:
            return {}
        if self.drafter in ("default", "ngram"):
            lookup = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
            return {"method": "ngram", "num_speculative_tokens": self.max_draft, **lookup}
        return {"method": "draft_model", "model": self.drafter, "num_speculative_tokens": self.max_draft}
