"""The drafter's settings: environment `LAPS_SD_DRAFTER_*` and command line, checked at the start. No logic."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from protos.bounds import Dtype, KvTokens, Port, StepTimeoutS
from protos.settings import ServiceSettings


class Settings(ServiceSettings):
    """A drafter of LAPS-SD: one small model that guesses for the workers of a bigger one."""

    model_config = SettingsConfigDict(
        env_prefix="LAPS_SD_DRAFTER_",
        frozen=True,
        cli_prog_name="python -m worker_service.drafting",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        protected_namespaces=(),
    )

    model: str = Field(description="a Hugging Face directory, or a model that `laps-sd pull` put into the cache")
    port: Port = Field(50055, description="where workers dial; 0: any free one")
    worker_names: list[str] = Field(["worker"], description="in a worker's certificate, under TLS; []: any name")
    device: str = Field("auto", description="auto, cpu or cuda")
    dtype: Dtype = "auto"
    threads: int = Field(0, ge=0, description="CPU threads of the model; 0: all cores")
    kv_tokens: KvTokens = Field(32_768, description="tokens of all texts together whose KV fits into memory")
    block_tokens: int = Field(16, ge=1, description="tokens in a block of KV")
    chains: int = Field(32, ge=1, le=1024, description="chains that grow by a token in one pass")
    sessions: int = Field(64, ge=1, le=1024, description="workers at a time")
    handles: int = Field(256, ge=1, le=65_536, description="texts of one worker at a time")
    session_tokens: int = Field(1 << 20, ge=192, description="tokens of all texts of one worker")
    metrics_port: Port | None = Field(
        None, description="serves /metrics, /health and /live, on --host; 0: any free one"
    )
    step_timeout_s: StepTimeoutS = Field(
        30.0, description="a pass that takes so much longer than expected hangs: the drafter ends with 1"
    )
    warm_up_timeout_s: StepTimeoutS = Field(900.0, description="as step_timeout_s, for the first passes")

    @property
    def blocks(self) -> int:
        return -(-self.kv_tokens // self.block_tokens)
