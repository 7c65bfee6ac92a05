"""What `laps-sd up` can be told: one model, from which the flags, the variables LAPS_SD_* and the settings in
laps-sd.toml follow (flags.py). Nothing is looked up on the machine here: checks.py does that."""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge

from laps_sd.draft_len import parse_draft_len
from laps_sd.flags import Flag
from protos.bounds import DrainS, Dtype, HostKvTokens, KvTokens, LogLevel, Port, Slots, Weights

Device: TypeAlias = Literal["auto", "cpu", "cuda"]
Engine: TypeAlias = Literal["own", "vllm"]
AtLeastOne = Annotated[int, Ge(1)]
Drafters = Annotated[int, Ge(0)]
DRAFTERS = ("none", "ngram", "default")  # beside folders, and those of other processes
REMOTE = "remote:"


def check_drafter(drafter: str) -> str:
    """The absolute path of a folder, or none, ngram, default, or where drafters listen. Raises ValueError."""
    if drafter in DRAFTERS:
        return drafter
    if drafter.startswith(REMOTE):
        from protos.settings import addresses  # it loads much

        return REMOTE + addresses(drafter.removeprefix(REMOTE))
    try:
        folder = Path(drafter).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{drafter}: {error}") from None
    if not folder.is_dir():
        raise ValueError(f"{drafter!r} is none of none, ngram, default, remote:HOST:PORT, and no directory")
    return str(folder.resolve())


def _backlog(text: str) -> str:
    with suppress(ValueError):
        if text == "auto" or float(text) > 0:
            return text
    raise ValueError(f"{text!r} is neither auto nor a number of seconds over 0")


def parse_json_object(text: str) -> str:
    """The text, which must be a JSON object. Raises ValueError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is no JSON object")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Each field with a Flag is a flag, a variable and a setting in the file. Port 0 is any free port."""

    model: Annotated[str, Flag("As in `laps-sd pull`.", "worker")] = "smollm2-135m"
    schedulers: Annotated[AtLeastOne, Flag("One leads, the others stand by.", "scheduler")] = 1
    workers: Annotated[AtLeastOne, Flag("Worker processes; they share the cores.", "worker")] = 1
    devices: Annotated[
        AtLeastOne,
        Flag("Devices that share the model, with one worker: torchrun starts a process on each.", "worker"),
    ] = 1
    stages: Annotated[
        AtLeastOne,
        Flag("Processes that the model's layers are spread over, with one worker.", "worker"),
    ] = 1
    slots: Annotated[Slots, Flag("Requests that a worker runs in one round.", "worker")] = 4
    kv_tokens: Annotated[KvTokens | None, Flag("Tokens in a worker's KV memory. Default: 32768.", "worker")] = None
    host_kv_tokens: Annotated[
        HostKvTokens | None,
        Flag("Of KV, offloaded to the host's memory; default: as --kv-tokens on a GPU, else 0.", "worker"),
    ] = None
    policy: Annotated[str, Flag("The order of requests: default (gittins), laps-sd, fcfs, ...", "scheduler")] = (
        "default"
    )
    policy_set: Annotated[
        tuple[str, ...], Flag("A policy's setting; repeatable.", "scheduler", metavar="NAME=VALUE")
    ] = ()
    drafter: Annotated[
        str,
        Flag(
            "PATH: of `laps-sd distill`, or of a small model; default: the one that comes with MODEL, or ngram.",
            "worker",
            metavar="none|ngram|PATH|remote:HOST:PORT|default",
            parser=check_drafter,
        ),
    ] = "default"
    drafters: Annotated[
        Drafters, Flag("Processes that draft for the workers, apart from them; --drafter then follows.", "drafter")
    ] = 0
    drafter_model: Annotated[str | None, Flag("Of --drafters: a small one with MODEL's tokens.", "drafter")] = None
    draft_len: Annotated[  # None: the scheduler chooses it for each request and round
        int | None,
        Flag("Tokens drafted per round; auto: as many as pay.", "scheduler", metavar="N|auto", parser=parse_draft_len),
    ] = 4
    device: Annotated[Device, Flag("Where the model runs; auto: on a GPU if there is one.", "worker")] = "auto"
    dtype: Annotated[Dtype, Flag("auto: bfloat16 where it is native. float32: exact.", "worker")] = "auto"
    weights: Annotated[Weights, Flag("int8, int4: quantised; stored: the GGUF's own bits; on a CPU.", "worker")] = (
        "auto"
    )
    engine: Annotated[Engine, Flag("own, or vllm: vLLM in an environment of its own.", "worker")] = "own"
    vllm_python: Annotated[
        Path | None, Flag("The interpreter of the environment that vLLM is installed in.", "worker", metavar="PATH")
    ] = None
    vllm_args: Annotated[
        str | None,
        Flag(
            'For vLLM\'s EngineArgs: {"tensor_parallel_size": 2}.', "worker", metavar="JSON", parser=parse_json_object
        ),
    ] = None
    redis: Annotated[str | None, Flag("Default: it starts a server itself.", "scheduler", metavar="URL")] = None
    data_dir: Annotated[
        Path | None,
        Flag(
            "For the Redis that it starts; keeps queued requests. "
            "Default: ~/.local/share/laps-sd/redis/PORT, by --grpc-port; none for port 0.",
            "scheduler",
            metavar="DIR",
        ),
    ] = None
    grpc_port: Annotated[Port, Flag("0: any.", "gateway")] = 50051
    http_port: Annotated[Port, Flag("0: any.", "gateway")] = 8080
    api_keys: Annotated[
        Path | None, Flag("With a line for each key, as `laps-sd key new` prints it.", "gateway", metavar="FILE")
    ] = None
    tenants: Annotated[
        Path | None, Flag("A line `NAME weight=2 requests=9 tokens=9000` each.", "scheduler", metavar="FILE")
    ] = None
    max_backlog_s: Annotated[
        str,
        Flag(
            "Seconds of work that may wait; more is refused. auto: 40 mean requests'. inf: no bound.",
            "scheduler",
            metavar="auto|S|inf",
            parser=_backlog,
        ),
    ] = "inf"
    certs: Annotated[Path | None, Flag("Of `laps-sd certs`: mutual TLS between the services.", metavar="DIR")] = (
        None  # None: plaintext, on loopback
    )
    metrics_targets: Annotated[
        Path | None,
        Flag(
            "Every service serves its metrics, and this file tells Prometheus where; default: the gateway's alone.",
            metavar="FILE",
        ),
    ] = None
    drain_s: Annotated[DrainS, Flag("How long running requests may go on after SIGTERM.", "gateway")] = 30.0
    log_level: Annotated[LogLevel, Flag("Of every service.")] = "info"

    event_log: Path | None = None  # file in which the scheduler writes every event and plan
    max_requests: int | None = None  # that the gateway serves at once; None: the gateway's default
    pace: str | None = None  # the worker's --pace, JSON; None: as fast as the machine is
    services: dict[str, dict[str, Any]] = field(default_factory=dict)  # further settings: by service, by name

    @property
    def processes(self) -> int:
        """Of one worker."""
        return self.devices * self.stages
