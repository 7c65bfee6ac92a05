"""The scheduler's settings, read once from flags and LAPS_SD_SCHEDULER_* variables, and refused at start if wrong."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from protos.bounds import DraftLen, Port
from protos.settings import ServiceSettings, is_loopback
from scheduler_service.core.core import PREFILL_CHUNK
from scheduler_service.core.policies import Policy, make_policy
from scheduler_service.core.types import Bounds
from scheduler_service.guarded import guarded
from scheduler_service.predictor import PredictorKind, lacks
from scheduler_service.store import connection
from scheduler_service.store.acl import NAMESPACE
from scheduler_service.tenants import read_terms


class Settings(ServiceSettings):
    model_config = SettingsConfigDict(
        env_prefix="LAPS_SD_SCHEDULER_",
        cli_prog_name="python -m scheduler_service",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=False,
        frozen=True,
    )

    port: Port = Field(50052, description="serves workers and gateways alike; 0: any free port")
    gateway_names: list[str] = Field(["gateway"], description="in a gateway's certificate, under TLS; []: any name")
    worker_names: list[str] = Field(["worker"], description="in a worker's certificate, under TLS; []: any name")
    standby: bool = Field(False, description="lead only while no other scheduler does; else: at once, instead of it")
    lease_s: float = Field(
        0.75, gt=0.25, description="a leader that writes nothing for so long is replaced by a standby"
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="also rediss://USER@HOST, unix:///path/to.sock, redis+sentinel://HOST,HOST,HOST/PRIMARY",
    )
    redis_password_file: Path | None = Field(None, description="holds the password, in place of the URL")
    redis_sentinel_password_file: Path | None = Field(
        None, description="likewise of the Sentinels, if they ask for one"
    )
    redis_replicas: int = Field(
        0, ge=0, le=16, description="so many have a commit before it is acknowledged and told; 0: none need have it"
    )
    namespace: str = Field("laps-sd", pattern=f"^{NAMESPACE}$", description="prefix of every key in Redis")
    policy: str = "default"
    policy_set: list[str] = Field(default=[], description="name=value, as often as needed")
    predictor: PredictorKind = Field(
        PredictorKind.ONLINE, validate_default=True, description="of output lengths and acceptance, or none"
    )
    draft_len: DraftLen | Literal["auto"] = Field(
        4, description="tokens proposed per round; auto: as many as pay, by request and round"
    )
    prefill_chunk: int = Field(PREFILL_CHUNK, ge=1, le=2**31, description="tokens of prompt computed in one round")
    max_live: int = Field(10_000, ge=1, description="requests waiting or running; more are refused")
    max_live_tokens: int = Field(
        10_000_000, ge=1, description="of prompt and output, as many as those requests may come to; more are refused"
    )
    max_backlog_s: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto", description="seconds of work that may wait, but for class batch; auto: of 40 mean requests; inf: any"
    )
    tenants: Path | None = Field(
        None, description="file: a line `NAME weight=2 requests=9 tokens=9000` each; `*`: others"
    )
    ready_first: bool = Field(
        True,
        description="while drafts of a request are on their way from a drafter elsewhere, the next that is ready runs",
    )
    max_pending_steps: int = Field(
        16, ge=1, description="reports of one worker that may wait for Redis; then its planning waits, too"
    )
    max_lag: int = Field(16, ge=1, le=2**31, description="rounds that a worker may run ahead of its last command")
    report_within_ms: int = Field(
        0, ge=0, le=1000, description="how long rounds may wait to share a report, and reports a command; 0: not at all"
    )
    worker_timeout_s: float = Field(
        30.0,
        ge=3,
        description="a worker not heard of for so long is lost; without work it tells each second that it lives",
    )
    step_timeout_s: float = Field(
        60.0, gt=0, description="a worker that owes a round so much longer than expected hangs, and is lost"
    )
    orphan_timeout_s: float = Field(
        60.0, gt=0, description="a request that no gateway asks for so long ends, unless its client said DETACH"
    )
    max_deaths: int = Field(
        3, ge=1, description="a request that was alone on so many workers in a row when they died is ended"
    )
    keep_s: int = Field(600, ge=1, le=365 * 86_400, description="how long an ended request can still be asked for")
    metrics_port: Port | None = Field(None, description="/metrics, /health, /live, on --host; 0: any free")
    event_log: Path | None = Field(None, description="append every event and plan here, as JSON lines")

    @field_validator("redis_url")
    @classmethod
    def _is_a_redis_url(cls, url: str) -> str:
        try:
            connection.connect(url, 1.0, {})
        except (ValueError, TypeError, AttributeError):  # whose words may hold a part of a password
            raise ValueError(f"is not of the form {connection.FORM}; special characters are percent-encoded") from None
        return url

    @field_validator("tenants")
    @classmethod
    def _terms_are_usable(cls, file: Path | None) -> Path | None:
        if file is not None:
            read_terms(file)
        return file

    @field_validator("predictor")
    @classmethod
    def _can_learn(cls, kind: PredictorKind) -> PredictorKind:
        if missing := lacks(kind):
            raise ValueError(missing)
        return kind

    @field_validator("redis_password_file", "redis_sentinel_password_file")
    @classmethod
    def _is_readable(cls, file: Path | None) -> Path | None:
        try:
            if file is not None and not file.read_text().strip():
                raise ValueError(f"{file}: empty")
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}") from error
        return file

    @property
    def redis_in_the_clear(self) -> bool:
        """Whether prompts and a password go to another machine unencrypted."""
        encrypted = self.redis_url.startswith("rediss")
        return not encrypted and not all(map(is_loopback, connection.hosts(self.redis_url)))

    def redis_options(self) -> dict[str, str]:
        """Beside the URL: the password, and under rediss:// our own certificate and whose we trust."""
        options = {}
        if self.redis_password_file is not None:
            options["password"] = self.redis_password_file.read_text().strip()
        if self.redis_sentinel_password_file is not None:
            options["sentinel_password"] = self.redis_sentinel_password_file.read_text().strip()
        if self.tls and self.redis_url.startswith("rediss"):
            names = {"ssl_ca_certs": self.tls.ca, "ssl_certfile": self.tls.cert, "ssl_keyfile": self.tls.key}
            options |= {name: str(file) for name, file in names.items()}
        return options

    @model_validator(mode="after")
    def _only_sentinels_have_a_password_of_their_own(self) -> Self:
        if self.redis_sentinel_password_file is not None and not connection.by_sentinels(self.redis_url):
            raise ValueError("redis_sentinel_password_file is for a redis_url that begins with redis+sentinel://")
        return self

    @model_validator(mode="after")
    def _policy_exists(self) -> Self:
        self.make_policy()
        return self

    @model_validator(mode="after")
    def _a_report_can_hold_two_rounds(self) -> Self:
        if self.report_within_ms and self.max_lag < 8:
            raise ValueError(
                f"report_within_ms needs a max_lag of at least 8, not {self.max_lag}: "
                "a report holds at most a quarter of max_lag's rounds, and a command is due after half of them"
            )
        return self

    @property
    def bounds(self) -> Bounds:
        backlog_s = None if self.max_backlog_s == "auto" else self.max_backlog_s
        return Bounds(self.max_live, self.max_live_tokens, backlog_s)

    def make_policy(self) -> Policy:
        return guarded(make_policy(self.policy, self.policy_set))
