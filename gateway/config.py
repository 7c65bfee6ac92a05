"""The gateway's settings: environment `LAPS_SD_GATEWAY_*` and command line, checked at the start. No logic."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

RETRY_AFTER_MS = 1000  # hint to a client that the gateway itself refuses


class Settings(BaseSettings):
    """The front door of LAPS-SD: text in, streamed text out."""

    model_config = SettingsConfigDict(
        env_prefix="LAPS_SD_GATEWAY_",
        frozen=True,
        cli_prog_name="python -m gateway",
        cli_kebab_case=True,
        cli_implicit_flags=True,
    )

    host: str = Field("127.0.0.1", description="address to bind to; there is no authentication yet")
    grpc_port: int = Field(50051, ge=0, le=65535, description="0: any")
    http_port: int = Field(8080, ge=0, le=65535, description="of the Prometheus metrics; 0: any")
    scheduler: str = Field("127.0.0.1:50052", description="HOST:PORT of the scheduler")
    ready_file: Path | None = Field(None, description="written with the bound ports, as JSON, once they are bound")
    max_requests: int = Field(1024, ge=1, description="live requests; above: RESOURCE_EXHAUSTED")
    max_input_bytes: int = Field(1 << 20, ge=1, description="UTF-8 bytes of a prompt, or of a chat's messages together")
    request_timeout_s: float = Field(3600, gt=0, description="longest life of a request")
    reconnect_timeout_s: float = Field(30, gt=0, description="how long streams survive without a scheduler")
    rpc_timeout_s: float = Field(5, gt=0, description="of one question to the scheduler")
    drain_s: float = Field(30, ge=0, description="how long running requests may go on after SIGTERM")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$")
