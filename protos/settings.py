"""Settings that all services share, read from flags and environment. Wrong settings end the process at its start, each
with a sentence. No service lives here."""

import re
import sys
from typing import Annotated, ClassVar, Self, TypeVar

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, CliApp, SettingsError

from protos.bounds import LogLevel, Port
from protos.channels import is_loopback as is_loopback
from protos.misspelt import refuse_misspelt
from protos.tls import Tls

BAD_SETTINGS = 2  # exit code: starting again is of no use
LEFT = "told to drain, and gone"  # a service's last words: starting it again is not wanted


class ServiceSettings(BaseSettings):
    """A service binds to an address that other machines can reach only if it authenticates its peers."""

    host: str = Field("127.0.0.1", description="address to bind to; other than loopback: needs authentication")
    tls: Tls = Field(default_factory=Tls, description="mutual TLS with the other services")
    health_host: str = Field("127.0.0.1", description="address of --health-port, which needs no authentication")
    health_port: Port | None = Field(
        None, description="grpc.health.v1 in plaintext and nothing else, for probes; 0: any free one"
    )
    insecure: bool = Field(False, description="bind where others can connect, unauthenticated: closed networks only")
    reflection: bool = Field(True, description="serve the interface's description to anybody who asks")
    log_level: LogLevel = "info"
    metrics_prefix: str = Field(
        "laps_sd_", pattern="^[a-zA-Z_:][a-zA-Z0-9_:]*$", description="of every metric; vllm: for dashboards of vLLM"
    )
    otlp_endpoint: str = Field(
        "",
        pattern="^(https?://[^/]+/?)?$",
        description="http://HOST:PORT of an OpenTelemetry collector; default: OTEL_EXPORTER_OTLP_ENDPOINT, or none",
    )
    trace_ratio: float = Field(1.0, ge=0, le=1, description="of the traces that begin here, how many are recorded")
    of_up: ClassVar[tuple[str, ...]] = ()  # flags of `laps-sd up` alone that may come in a variable with our prefix

    @model_validator(mode="after")
    def _nobody_is_let_in(self) -> Self:
        if not is_loopback(self.host) and not self.insecure and (missing := self.lacks()):
            raise ValueError(
                f"host: {self.host} can be reached from elsewhere: {missing}, or --insecure on a closed network"
            )
        return self

    def lacks(self) -> str:
        """Which settings are still missing before other machines may reach the port; empty: none."""
        return "" if self.tls else "set --tls.ca, --tls.cert and --tls.key (`laps-sd certs` makes them)"


Settings = TypeVar("Settings", bound=ServiceSettings)


def read(kind: type[Settings], service: str) -> Settings:
    """The settings from the command line and the environment. If some are wrong it prints a sentence for each of
    them and ends the process."""
    try:
        settings = CliApp.run(kind)
        refuse_misspelt_variables(kind)
        if ended := settings.tls.expired():
            print(f"{service}: {ended}", file=sys.stderr)  # noqa: T201
            sys.exit(1)  # it may be renewed by the next start
        return settings
    except ValidationError as error:
        for problem in error.errors(include_input=False):  # an input may be a password
            where = ".".join(map(str, problem["loc"]))
            words = problem["msg"].removeprefix("Value error, ")
            print(": ".join(filter(None, (service, where, words))), file=sys.stderr)  # noqa: T201
    except SettingsError as error:
        print(f"{service}: {unreadable(error)}", file=sys.stderr)  # noqa: T201
    except ValueError as error:
        print(f"{service}: {error}", file=sys.stderr)  # noqa: T201
    sys.exit(BAD_SETTINGS)


def unreadable(error: SettingsError) -> str:
    """Why a variable or an argument cannot be read."""
    return f'{error}: {error.__cause__}; several values are written as JSON, such as ["one", "two"]'


def refuse_misspelt_variables(kind: type[ServiceSettings]) -> None:
    """Raises ValueError."""
    of_up = tuple(name.upper() for name in kind.of_up)
    refuse_misspelt(str(kind.model_config["env_prefix"]), kind.model_fields, of_up)
    refuse_misspelt(str(Tls.model_config["env_prefix"]), Tls.model_fields)


_ADDRESS = re.compile(r"([^\s:,\[\]]+|\[[^\s,\[\]]+\]):(?P<port>\d{1,5})")
_MOST_PORT = (1 << 16) - 1


def addresses(text: str) -> str:
    """`text`, if it is HOST:PORT or several of them with commas between. Raises ValueError otherwise."""
    found = [_ADDRESS.fullmatch(one) for one in text.split(",")]
    if not all(one and 0 < int(one["port"]) <= _MOST_PORT for one in found):
        raise ValueError(f"{text!r} is not HOST:PORT, nor several of them with commas")
    return text


Addresses = Annotated[str, AfterValidator(addresses)]
