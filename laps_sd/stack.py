"""The stack on one machine: which processes, with which flags, started and stopped in which order."""

import asyncio
import fcntl
import json
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from platformdirs import user_data_dir
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from laps_sd import targets, vllm_python
from laps_sd.child_logs import as_entry
from laps_sd.client import AsyncClient, NotServing
from laps_sd.options import Options
from laps_sd.ports import HOST, StackError, claim_ports
from laps_sd.redis_server import check_reachable, find_server, server_command
from laps_sd.supervise import BAD_SETTINGS, Child, Command, end, leashed

SCHEDULER = "scheduler"
POLL_S = 0.05
READY_TIMEOUT_S = 900.0  # a big model on a slow disk
WORKER_DRAIN_S = 5.0
PULL_END_S = 5.0  # what `pull` may take to put its files in order once it is interrupted
DRAIN_SLACK_S = 5.0

Emit = Callable[[bytes], object]

# Measured: without the passive wait the OpenMP threads of two workers compete for the cores (steps of 500 ms).
# Without the malloc settings memory goes back to the system after each step, which can double the step's time.
_WORKER_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "TOKENIZERS_PARALLELISM": "false",
}


def _emit_entry(emit: Emit, child: str, line: bytes) -> None:
    if line.strip():
        emit(as_entry(child, line))


def to_stderr(line: bytes) -> None:
    sys.stderr.buffer.write(line)
    sys.stderr.buffer.flush()


class NoModel(StackError):
    """The model cannot be had. There is no message: `laps-sd pull` has said why, on stderr."""

    hopeless = True


class Stack:
    """Running processes, in the order in which they start.

    `grpc`, `http`: the gateway's HOST:PORT. `ca`: the certificate that its TLS certificate is checked with, if any.
    """

    def __init__(self, commands: list[Command], grpc: str, http: str, ca: Path | None, emit: Emit) -> None:
        self.grpc, self.http, self.ca = grpc, http, ca
        self.children = [Child(command, partial(_emit_entry, emit, command.name)) for command in commands]

    def client(self) -> AsyncClient:
        return AsyncClient(self.grpc, ca=self.ca)

    async def ready(self) -> None:
        """Returns when a warmed worker serves. Raises NotServing."""
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(NotServing),
            stop=stop_after_delay(READY_TIMEOUT_S),
            wait=wait_fixed(0.2),
            reraise=True,
        ):
            with attempt:
                async with self.client() as client:
                    await client.ready(READY_TIMEOUT_S)

    async def order_by(self, policy: str) -> None:
        """Starts the schedulers anew with another policy, while workers keep their model. Returns when the service goes
        by it. Stats must need no key. Raises TimeoutError, NotServing."""
        async with self.client() as client, asyncio.timeout(READY_TIMEOUT_S):
            now = before = (await client.stats()).epoch  # each leader has a higher one
            for child in self.children:
                if child.name == SCHEDULER:
                    words = list(child.command.arguments)
                    words[words.index("--policy") + 1] = policy
                    child.replace(replace(child.command, arguments=words))
            while now == before:
                await asyncio.sleep(POLL_S)
                with suppress(NotServing):
                    now = (await client.stats()).epoch
            await client.ready(READY_TIMEOUT_S)

    async def stop(self) -> None:
        """Stops the gateway first, which lets its requests end, then the workers, the schedulers and Redis."""
        for prefix in ("gateway", "worker", "scheduler", "redis"):
            await asyncio.gather(*(child.stop() for child in self.children if child.name.startswith(prefix)))


async def run(options: Options, use: Callable[[Stack], Awaitable[None]], emit: Emit = to_stderr) -> None:
    """Start the stack, run `use`, stop the stack. A child that dies in between is started again.

    `emit` gets each line that a child prints.

    Raises StackError or NoServer; or an ExceptionGroup that holds what `use` raised, or GaveUp if a child does not
    come up.
    """
    model = await find_model(options.model)
    measured = options.schedulers + options.workers + 1 if options.metrics_targets is not None else 0
    grpc_port, http_port, *ports = claim_ports(
        options.grpc_port, options.http_port, *[0] * (options.schedulers + measured)
    )
    with (
        tempfile.TemporaryDirectory(prefix="laps-sd-") as folder,
        own_redis(options, Path(folder)) as (redis_url, redis),
        ExitStack() as parts,
    ):
        scheduler = ",".join(f"{HOST}:{port}" for port in ports[: options.schedulers])
        services = [
            *(scheduler_command(options, port, redis_url) for port in ports[: options.schedulers]),
            *(worker_command(options, i, scheduler, model, Path(folder)) for i in range(options.workers)),
            gateway_command(options, grpc_port, http_port, scheduler),
        ]
        if options.metrics_targets is not None:
            services, told = with_metrics(services, ports[options.schedulers :])
            parts.enter_context(targets.written(options.metrics_targets, told))
        commands = [*redis, *services]
        ca = options.certs / "gateway" / "ca.crt" if options.certs else None
        stack = Stack(commands, f"{HOST}:{grpc_port}", f"{HOST}:{http_port}", ca, emit)
        about = {"model": str(model), "workers": options.workers, "policy": options.policy}
        emit(json.dumps({"service": "up", **about, "event": "starting", "level": "info"}).encode() + b"\n")
        async with asyncio.TaskGroup() as tasks:
            for child in stack.children:
                tasks.create_task(child.keep_running(), name=child.name)
            try:
                await use(stack)
            finally:
                await stack.stop()


async def find_model(model: str) -> Path:
    """The model's directory. The worker's module `pull` fetches the model if it is not there. Raises StackError."""
    process = await asyncio.create_subprocess_exec(
        *leashed(_python("laps_sd.interrupt", "worker_service.pull", model)),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            await end(process, PULL_END_S, signal.SIGINT)  # so that nothing half-made stays in the cache
    if process.returncode == BAD_SETTINGS:
        raise NoModel
    if process.returncode:
        raise StackError("no model, no service")
    return Path(output.decode().strip())


def scheduler_command(options: Options, port: int, redis_url: str) -> Command:
    policy_set = [word for setting in options.policy_set for word in ("--policy-set", setting)]
    arguments = _python("scheduler_service", "--host", HOST, "--port", port)
    arguments += ["--policy", options.policy, *policy_set, *_tls(options, "scheduler")]
    arguments += [
        "--draft-len",
        "auto" if options.draft_len is None else str(options.draft_len),
        "--log-level",
        options.log_level,
    ]
    arguments += ["--max-backlog-s", options.max_backlog_s]
    if options.tenants is not None:
        arguments += ["--tenants", str(options.tenants)]
    if options.event_log is not None:
        arguments += ["--event-log", str(options.event_log)]
    if options.schedulers > 1:
        arguments.append("--standby")
    # Not a flag, since every user of the machine can list flags, and the URL may hold a password.
    environment = _further(options, "scheduler") | {"LAPS_SD_SCHEDULER_REDIS_URL": redis_url}
    return Command(SCHEDULER, arguments, environment)


def worker_command(options: Options, index: int, scheduler: str, model: Path, folder: Path | None = None) -> Command:
    """`folder`: for what a worker in another environment imports; None: it is not started, only checked."""
    threads = max(1, _cores() // (options.workers * options.devices))
    name = f"worker-{index}"
    arguments = ["--scheduler", scheduler, "--worker-id", name, "--model", str(model)]
    arguments += ["--dtype", options.dtype, "--slots", str(options.slots)]
    arguments += ["--drafter", options.drafter, "--threads", str(threads)]
    environment = {**_WORKER_ENVIRONMENT, **_further(options, "worker"), "OMP_NUM_THREADS": str(threads)}
    if options.engine == "vllm":
        arguments = [*vllm_python.command(options.vllm_python), *arguments]
        environment |= vllm_python.environment(options.vllm_args, folder)
    else:
        arguments = [*_python("worker_service"), *arguments, "--device", options.device]
    arguments += _tls(options, "worker")
    if options.draft_len is not None:
        arguments += ["--max-draft", str(options.draft_len)]
    arguments += ["--host", HOST, "--health-port", "0", "--log-level", options.log_level]
    arguments += ["--drain-s", str(WORKER_DRAIN_S)]
    if options.kv_tokens is not None:
        arguments += ["--kv-tokens", str(options.kv_tokens)]
    if options.host_kv_tokens is not None:
        arguments += ["--host-kv-tokens", str(options.host_kv_tokens)]
    if options.pace is not None:
        arguments += ["--pace", options.pace]
    if options.devices > 1:
        # torchrun's processes would outlive a torchrun that is killed, so each ends with torchrun (`leashed`).
        torchrun = _python("torch.distributed.run", "--standalone", "--nproc-per-node", options.devices, "--no-python")
        arguments = [*torchrun, *leashed(arguments, parent=0)]
    # A worker that dies after it has attached may have died of a request. The scheduler finds out which, so that is
    # no reason to give up.
    return Command(
        name,
        arguments,
        environment,
        stop_s=WORKER_DRAIN_S + DRAIN_SLACK_S,
        up=b'"event": "attached"',
        refused=b"exitcode  : 2 " if options.devices > 1 else None,  # torchrun's own exit code is 1 then
    )


def gateway_command(options: Options, grpc_port: int, http_port: int, scheduler: str) -> Command:
    arguments = _python("gateway", "--host", HOST, "--grpc-port", grpc_port, "--http-port", http_port)
    arguments += ["--scheduler", scheduler, "--drain-s", str(options.drain_s), "--log-level", options.log_level]
    arguments += _tls(options, "gateway")
    if options.max_requests is not None:
        arguments += ["--max-requests", str(options.max_requests)]
    if options.api_keys is not None:
        arguments += ["--api-keys", str(options.api_keys)]
    return Command("gateway", arguments, _further(options, "gateway"), stop_s=options.drain_s + DRAIN_SLACK_S)


def _further(options: Options, service: str) -> dict[str, str]:
    """What laps-sd.toml says of a service and no option of ours does, as variables. The environment's count more."""
    told = {
        f"LAPS_SD_{service.upper()}_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
        for name, value in options.services.get(service, {}).items()
    }
    return {name: value for name, value in told.items() if name not in os.environ}


def with_metrics(services: Sequence[Command], ports: Sequence[int]) -> tuple[list[Command], list[tuple[str, str]]]:
    """The same services, each with a port for its metrics; and the name of each with its HOST:PORT."""
    pairs = list(zip(services, ports, strict=True))
    told = [(command.name, f"{HOST}:{port}") for command, port in pairs]
    return [
        replace(command, arguments=[*command.arguments, "--metrics-port", str(port)]) for command, port in pairs
    ], told


def _tls(options: Options, service: str) -> list[str]:
    if options.certs is None:
        return []
    folder = options.certs / service
    return ["--tls.ca", f"{folder}/ca.crt", "--tls.cert", f"{folder}/tls.crt", "--tls.key", f"{folder}/tls.key"]


@contextmanager
def own_redis(options: Options, folder: Path) -> Iterator[tuple[str, list[Command]]]:
    """The URL of Redis, and the command that starts it: none if `options.redis` names a server that runs already.

    Raises StackError or NoServer.
    """
    if options.redis is not None:
        check_reachable(options.redis)
        yield options.redis, []
        return
    data = options.data_dir
    if data is None:
        data = (
            Path(user_data_dir("laps-sd"), "redis", str(options.grpc_port)) if options.grpc_port else folder / "redis"
        )
    data.mkdir(parents=True, exist_ok=True)
    with (data / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StackError(f"{data} is used by another stack; give --data-dir") from error
        # In `folder`, since a socket's path may have at most 107 bytes and no other user may reach it.
        socket_path = folder / "redis.sock"
        yield f"unix://{socket_path}", [server_command(find_server(), data, socket_path)]


def _cores() -> int:
    """The cores that this process may use. Systems other than Linux do not say; there it is all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _python(module: str, *arguments: object) -> list[str]:
    """The command that runs a module. -P keeps the current folder, which may hold a `gateway`, off the module path."""
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]
