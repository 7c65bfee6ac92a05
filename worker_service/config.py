"""The worker's settings: environment `LAPS_SD_WORKER_*` and command line, checked at the start. No logic."""

import errno
import math
import os
import socket
from dataclasses import astuple
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from protos.bounds import DraftLen, DrainS, Dtype, HostKvTokens, KvTokens, Port, Slots, StepTimeoutS, Weights
from protos.settings import Addresses, ServiceSettings, addresses, is_loopback
from worker_service.engine.types import CostProfile, Place

MOST_OVER_STAGES = 16  # drafts of a request in a step, unless --max-draft says otherwise


def _one_address(text: str) -> str:
    if "," in addresses(text):
        raise ValueError(f"{text!r} is not HOST:PORT")
    return text


Rendezvous = Annotated[str, AfterValidator(_one_address)]


def _possible(cost: CostProfile) -> CostProfile:
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in astuple(cost)):
        raise ValueError("seconds are finite and not negative")
    return cost


def _reachable(drafter: str) -> str:
    if drafter.startswith("remote:"):
        addresses(drafter.removeprefix("remote:"))
        _check_packets()
    return drafter


def _check_packets() -> None:
    """What draft_post.py speaks to a drafter by. macOS has none."""
    try:
        for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET):
            end.close()
    except OSError as error:
        if error.errno == errno.EPROTONOSUPPORT:
            raise ValueError(
                "a drafter in another process needs sockets of packets (SOCK_SEQPACKET), and this system has none"
            ) from None


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
    max_draft: DraftLen = Field(8, description="most tokens drafted for a request in one step; over --stages 16")
    step_timeout_s: StepTimeoutS = Field(
        30.0, description="a step that takes so much longer than expected hangs: the worker ends with 1"
    )
    warm_up_timeout_s: StepTimeoutS = Field(
        900.0, description="as step_timeout_s, for the warm-up: its first passes may compile"
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

    of_up = ("devices",)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """An empty variable is none, as compose passes on what nobody has set. An empty flag somebody has written."""
        return init_settings, EnvSettingsSource(settings_cls, env_ignore_empty=True)

    @property
    def weights_kind(self) -> str:
        """What becomes of the weights in the model's files; auto: an engine of another kind takes them as they are."""
        return "auto"


class Settings(CommonSettings):
    """A worker of LAPS-SD: one model that drafts and verifies for one scheduler."""

    device: str = Field("auto", description="auto, cpu or cuda")
    weights: Weights = Field(
        "auto",
        description="auto: whole, in dtype, or stored where that is faster; on a CPU also int8 or int4: quantised "
        "while they load; stored: as the model's GGUF had them",
    )
    kv_tokens: KvTokens = Field(
        32_768,
        description="tokens of all requests together whose KV fits into memory; of a whole model on a GPU by default "
        "as many as there is room for",
    )
    host_kv_tokens: HostKvTokens | None = Field(
        None, description="more, offloaded to the host's memory; default: as kv_tokens on a GPU, else 0"
    )
    block_tokens: int = Field(64, ge=1, description="tokens in a block of KV")
    max_prefill: int = Field(
        1024, ge=1, description="most tokens of prompts in one step; where a GPU's KV is sized, so are this and --slots"
    )
    attention: Literal["auto", "torch", "flashinfer", "graphs"] = Field(
        "auto",
        description="auto: native kernels on a CPU, else torch; on a GPU also flashinfer, or graphs: torch, with short "
        "passes as CUDA graphs; no GPU has tried these two yet",
    )
    drafter: Annotated[str, AfterValidator(_reachable)] = Field(
        "default", description="none, ngram, default, the directory of a head or causal LM, or remote:HOST:PORT,..."
    )
    drafter_names: list[str] = Field(["drafter"], description="in a remote drafter's certificate; []: its host's name")
    probe: str = Field(
        "default",
        description="of remaining length: none, default (the model's, if it has one), or its directory",
    )
    stages: int = Field(1, ge=1, description="processes that the model's layers are spread over, each a stage")
    stage: int | None = Field(
        None,
        ge=0,
        description="which of --stages this process is; the first, 0, leads; default: as torchrun says, or 0",
    )
    rendezvous: Rendezvous | None = Field(
        None,
        description="HOST:PORT where stage 0 waits for the others; elsewhere than on loopback: needs --insecure",
    )
    threads: int = Field(0, ge=0, description="CPU threads of the model; 0: all cores")
    pace: Annotated[CostProfile, AfterValidator(_possible)] | None = Field(
        None, description='JSON: be as fast as this cost profile, {"verify_s": 0.013, ...}, not faster; for comparisons'
    )

    @model_validator(mode="after")
    def _stages_find_each_other(self) -> Self:
        if self.stages == 1:
            if self.stage or self.rendezvous:
                raise ValueError("stages: 1 is a whole model, which has neither --stage nor --rendezvous")
            return self
        if self.weights != "auto":
            raise ValueError(f"weights: {self.weights} is of one process alone; --stages spreads a model over several")
        if self.attention in ("flashinfer", "graphs"):
            raise ValueError(f"attention: {self.attention} is not for a model over --stages")
        if self.rendezvous is None:
            raise ValueError("rendezvous: say where stage 0 is found, HOST:PORT, the same to all stages")
        if self.place.number >= self.stages:
            raise ValueError(f"stage: {self.place.number} is none of the stages 0 to {self.stages - 1}")
        if not is_loopback(self.rendezvous.rpartition(":")[0]) and not self.insecure:
            raise ValueError(
                f"rendezvous: {self.rendezvous} is not on loopback, and what stages send is neither encrypted nor "
                "authenticated: say --insecure on a closed network"
            )
        return self

    @property
    def weights_kind(self) -> Weights:
        return self.weights

    @property
    def place(self) -> Place:
        """This process's, among the stages."""
        return Place(int(os.environ.get("RANK", "0")) if self.stage is None else self.stage, self.stages)

    @property
    def most_drafts(self) -> int:
        """`max_draft`; where it is not said a model over stages takes more, for the way between them is paid once."""
        return MOST_OVER_STAGES if self.stages > 1 and "max_draft" not in self.model_fields_set else self.max_draft

    @property
    def blocks(self) -> int:
        return -(-self.kv_tokens // self.block_tokens)

    def host_blocks(self, device: str) -> int:
        """Blocks of offloaded KV on a `device` of this type. A CPU's KV is in the host's memory anyway."""
        by_default = self.kv_tokens if device == "cuda" else 0
        return (by_default if self.host_kv_tokens is None else self.host_kv_tokens) // self.block_tokens
