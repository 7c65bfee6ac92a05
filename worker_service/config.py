"""The worker's settings: environment `LAPS_SD_WORKER_*` and command line, checked at the start. No logic."""

import math
import os
import socket
from dataclasses import astuple
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_settings import SettingsConfigDict

from protos.bounds import DraftLen, DrainS, Dtype, HostKvTokens, KvTokens, Port, Slots
from protos.settings import Addresses, ServiceSettings
from worker_service.engine.types import CostProfile


def _possible(cost: CostProfile) -> CostProfile:
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in astuple(cost)):
        raise ValueError("seconds are finite and not negative")
    return cost


class CommonSettings(ServiceSettings):
    """The settings of every worker, whichever engine it has."""

    model_config = SettingsConfigDict(
        env_prefix="LAPS_SD_WORKER_",
        frozen=True,
        cli_prog_name="python -m worker_service",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        protected_namespaces=(),
    )

    model: str = Field(description="a Hugging Face directory, or a model that `laps-sd pull` put into the cache")
    scheduler: Addresses = Field("127.0.0.1:50052", description="HOST:PORT; of a pair both, with a comma")
    worker_id: str = Field(
        default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}", min_length=1, description="unique in a service"
    )
    dtype: Dtype = "auto"
    slots: Slots = Field(4, description="requests that run in one step")
    max_draft: DraftLen = Field(8, description="most tokens drafted for a request in one step")
    step_timeout_s: float = Field(
        30.0, gt=0, description="a step that takes so much longer than expected hangs: the worker ends with 1"
    )
    warm_up_timeout_s: float = Field(
        900.0, gt=0, description="as step_timeout_s, for the warm-up: its first passes may compile"
    )
    leave_if_refused: bool = Field(
        False, description="end with 2 where the scheduler does not take this model or version; default: ask again"
    )
    drain_s: DrainS = Field(
        5.0, description="how long running requests may go on after SIGTERM before they move elsewhere"
    )
    health_port: Port = Field(0, description="grpc.health.v1 in plaintext, for probes; 0: any free one")
    metrics_port: Port | None = Field(
        None, description="serves /metrics, /health and /live, on --host; 0: any free one"
    )


class Settings(CommonSettings):
    """A worker of LAPS-SD: one model that drafts and verifies for one scheduler."""

    device: str = Field("auto", description="auto, cpu or cuda")
    kv_tokens: KvTokens = Field(32_768, description="tokens of all requests together whose KV fits into memory")
    host_kv_tokens: HostKvTokens | None = Field(
        None, description="more, offloaded to the host's memory; default: as kv_tokens on a GPU, else 0"
    )
    block_tokens: int = Field(64, ge=1, description="tokens in a block of KV")
    drafter: str = Field("default", description="none, ngram, default, or the directory of a head or a causal LM")
    threads: int = Field(0, ge=0, description="CPU threads of the model; 0: all cores")
    pace: Annotated[CostProfile, AfterValidator(_possible)] | None = Field(
        None, description='JSON: be as fast as this cost profile, {"verify_s": 0.013, ...}, not faster; for comparisons'
    )

    @property
    def blocks(self) -> int:
        return -(-self.kv_tokens // self.block_tokens)

    def host_blocks(self, device: str) -> int:
        """Blocks of offloaded KV on a `device` of this type. A CPU's KV is in the host's memory anyway."""
        by_default = self.kv_tokens if device == "cuda" else 0
        return (by_default if self.host_kv_tokens is None else self.host_kv_tokens) // self.block_tokens
