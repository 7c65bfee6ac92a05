"""The gateway's settings, from the environment (`LAPS_SD_GATEWAY_*`) and the command line, checked at the start."""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Self

import grpc
from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from gateway.cell_file import read_cells
from gateway.feed import MOST_UNREAD
from gateway.keys import Keys
from protos.bounds import DrainS, Port
from protos.settings import Addresses, ServiceSettings, is_loopback
from protos.tls import Files

RETRY_AFTER_MS = 1000  # the hint to a client that the gateway itself refuses: when to try again


class Settings(ServiceSettings):
    """The front door of LAPS-SD: text in, streamed text out."""

    model_config = SettingsConfigDict(
        env_prefix="LAPS_SD_GATEWAY_",
        frozen=True,
        cli_prog_name="python -m gateway",
        cli_kebab_case=True,
        cli_implicit_flags=True,
    )

    grpc_port: Port = Field(50051, description="0: any")
    http_port: Port = Field(8080, description="OpenAI's API, health and the live page; 0: any")
    model_aliases: tuple[str, ...] = Field((), description="further names by which HTTP clients may ask for the model")
    cors_origins: tuple[str, ...] = Field((), description="origins of pages whose scripts may call --http-port")
    admin_host: str = Field("127.0.0.1", description="address of --admin-port and --metrics-port")
    metrics_port: Port | None = Field(
        None, description="serves /metrics, elsewhere than on loopback over mutual TLS; 0: any"
    )
    admin_port: Port | None = Field(
        None, description="serves what needs the right `admin`, no longer served on --grpc-port; 0: any"
    )
    scheduler: Addresses = Field("127.0.0.1:50052", description="HOST:PORT; of a pair both, with a comma")
    cells: Path | None = Field(
        None, description="TOML file of a service's cells, in place of --scheduler; looked at again when it changes"
    )
    cells_settle_s: float = Field(
        5, ge=0, description="until all gateways have read a changed --cells; requests whose cell changes wait"
    )
    cert: Path | None = Field(None, description="PEM file: what clients are shown; default: --tls.cert")
    key: Path | None = Field(None, description="PEM file: the private key of --cert")
    api_keys: Path | None = Field(None, description="file with a line for each key, as `laps-sd key new` prints it")
    ready_file: Path | None = Field(None, description="written with the bound ports, as JSON, once they are bound")
    max_requests: int = Field(1024, ge=1, description="live requests; above: RESOURCE_EXHAUSTED")
    max_input_bytes: int = Field(1 << 20, ge=1, description="UTF-8 bytes of a prompt, or of a chat's messages together")
    max_unread_tokens: int = Field(
        MOST_UNREAD,
        ge=1,
        description="of an answer kept for a client that does not read; the scheduler keeps the others",
    )
    stalled_s: float = Field(60, gt=0, description="the stream of a client that reads nothing for so long is cut")
    request_timeout_s: float = Field(3600, gt=0, description="longest life of a request")
    reconnect_timeout_s: float = Field(30, gt=0, description="how long streams survive without a scheduler")
    rpc_timeout_s: float = Field(5, gt=0, description="of one question to the scheduler")
    drain_s: DrainS = Field(30, description="how long running requests may go on after SIGTERM")

    @model_validator(mode="after")
    def _certificate_is_usable(self) -> Self:
        if bool(self.cert) != bool(self.key):
            raise ValueError("cert and key belong together: set both, or neither")
        self.server_credentials()
        return self

    @field_validator("api_keys")
    @classmethod
    def _keys_are_usable(cls, file: Path | None) -> Path | None:
        if file is not None:
            Keys(file)
        return file

    @field_validator("cells")
    @classmethod
    def _cells_are_usable(cls, file: Path | None) -> Path | None:
        try:
            if file is not None:
                read_cells(file)
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}") from error
        return file

    @model_validator(mode="after")
    def _nobody_administers(self) -> Self:
        if not (is_loopback(self.admin_host) or self.insecure or (self.tls and self.api_keys)):
            problem = f"admin_host: {self.admin_host} can be reached from elsewhere"
            raise ValueError(f"{problem}: set --api-keys, --tls.ca, --tls.cert and --tls.key, or --insecure")
        return self

    def metrics_ssl_contexts(self) -> Callable[[], ssl.SSLContext] | None:
        """On the port for metrics no key counts: who reads them from another machine shows a certificate of the CA."""
        return None if is_loopback(self.admin_host) else self.tls.ssl_contexts()

    @property
    def for_strangers(self) -> bool:
        """Other machines can reach the public ports."""
        return not is_loopback(self.host)

    def lacks(self) -> str:
        """A sentence about what a public port needs and does not have; empty if nothing. Keys tell clients apart, and
        without TLS anybody on the way could read them."""
        if self.api_keys is None:
            return "set --api-keys FILE (`laps-sd key new` makes its lines) and --cert, --key or --tls.cert, --tls.key"
        if not (self.cert or self.tls):
            return "set --cert and --key, or --tls.ca, --tls.cert and --tls.key (`laps-sd certs` makes them)"
        return ""

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Credentials of the gRPC port, to which any client may connect; None: plaintext. Raises ValueError."""
        return files.server_credentials(mutual=False) if (files := self._shown()) else None

    def ssl_contexts(self) -> Callable[[], ssl.SSLContext] | None:
        """The same for the HTTP port."""
        return files.ssl_contexts(mutual=False) if (files := self._shown()) else None

    def _shown(self) -> Files | None:
        """The certificate, with its key, that the public ports show to clients. Raises ValueError."""
        cert, key = (self.cert, self.key) if self.cert else (self.tls.cert, self.tls.key)
        return Files(None, cert, key) if cert and key else None
