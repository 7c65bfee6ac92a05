"""The stack on one machine: which processes, with which flags, started and stopped in which order."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from laps_sd import apart, scaling, targets, vllm_python
from laps_sd.child_logs import as_entry
from laps_sd.client import AsyncClient, NotServing
from laps_sd.find_model import find_model
from laps_sd.machine import cores
from laps_sd.options import Options
from laps_sd.ports import HOST, claim_ports
from laps_sd.redis_server import own_redis
from laps_sd.scratch import scratch
from laps_sd.supervise import Child, Command, leashed
from protos.settings import LEFT

SCHEDULER = "scheduler"
POLL_S = 0.05
READY_TIMEOUT_S = 900.0  # a big model on a slow disk
WORKER_DRAIN_S = 5.0
DRAIN_SLACK_S = 5.0

Emit = Callable[[bytes], object]

_KV_TOKENS = "LAPS_SD_WORKER_KV_TOKENS"
# Measured: without the passive wait the OpenMP threads of two workers compete for the cores (steps of 500 ms).
# Without the malloc settings memory goes back to the system after each step, which can double the step's time.
_WORKER_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "TOKENIZERS_PARALLELISM": "false",
}


def emit_entry(emit: Emit, child: str, line: bytes) -> None:
    """A line that cannot be written, to a full disk or a pipe that nobody reads any more, is lost. It ends nothing."""
    if line.strip():
        with suppress(OSError):
            emit(as_entry(child, line))


def to_stderr(line: bytes) -> None:
    """Past Python's buffer, which would keep what cannot be written, and fail on it when the process ends."""
    while line:
        line = line[os.write(sys.stderr.fileno(), line) :]


class Stack:
    """Running processes, in the order in which they start.

    `grpc`, `http`: the gateway's HOST:PORT; `scheduler`: where workers join. `ca`: the certificate that the gateway's
    TLS certificate is checked with, if any.
    """

    def __init__(
        self, commands: list[Command], grpc: str, http: str, scheduler: str, ca: Path | None, emit: Emit
    ) -> None:
        self.grpc, self.http, self.scheduler, self.ca, self._emit = grpc, http, scheduler, ca, emit
        self.children = [self.child(command) for command in commands]

    def child(self, command: Command) -> Child:
        """It does not run yet."""
        return Child(command, partial(emit_entry, self._emit, command.name))

    def client(self) -> AsyncClient:
        return AsyncClient(self.grpc, ca=self.ca or "")  # whatever LAPS_SD_CA says of other servers

    async def ready(self) -> None:
        """Returns when a warmed worker serves. Raises NotServing."""
        async with self.client() as client:
            await client.ready(READY_TIMEOUT_S)

    async def order_by(self, policy: str) -> None:
        """Starts the schedulers anew with another policy, while workers keep their model. Returns when the service goes
        by it. Stats must need no key. Raises TimeoutError, NotServing."""
        async with self.client() as client, asyncio.timeout(READY_TIMEOUT_S):
            now = before = (await client.stats()).epoch  # each leader has a higher one
            for child in self.children:
                if child.name.startswith(SCHEDULER):
                    words = list(child.command.arguments)
                    words[words.index("--policy") + 1] = policy
                    child.replace(replace(child.command, arguments=words))
            while now == before:
                await asyncio.sleep(POLL_S)
                with suppress(NotServing):
                    now = (await client.stats()).epoch
            await client.ready(READY_TIMEOUT_S)

    async def stop(self) -> None:
        """Stops the gateway first, which lets its requests end, then workers, drafters, schedulers and Redis."""
        told = {"words": "answers under way may go on; Ctrl-C again ends them", "event": "ending", "level": "info"}
        emit_entry(self._emit, "up", json.dumps({"service": "up"} | told).encode() + b"\n")
        for prefix in ("gateway", "worker", "drafter", "scheduler", "redis"):
            await asyncio.gather(*(child.stop() for child in self.children if child.name.startswith(prefix)))


async def run(options: Options, use: Callable[[Stack], Awaitable[None]], emit: Emit = to_stderr) -> None:
    """Start the stack, run `use`, stop the stack. A child that dies in between is started again.

    `emit` gets each line that a child prints.

    Raises StackError or NoServer; or an ExceptionGroup that holds what `use` raised, or GaveUp if a child does not
    come up.
    """
    model = await find_model(options.model)
    small = await find_model(options.drafter_model or options.model) if options.drafters else model
    apart.check_tokens(model, small)
    own = options.schedulers + options.drafters
    measured = own + options.workers + 1 if options.metrics_targets is not None else 0
    grpc_port, http_port, *ports = claim_ports(options.grpc_port, options.http_port, *[0] * (own + measured))
    drafters = ports[options.schedulers : own]
    options = apart.pointed(options, drafters)
    with (
        scratch() as folder,
        own_redis(options, folder) as (redis_url, redis),
        ExitStack() as parts,
    ):
        scheduler = ",".join(f"{HOST}:{port}" for port in ports[: options.schedulers])
        services = [
            *(scheduler_command(options, port, redis_url, i) for i, port in enumerate(ports[: options.schedulers])),
            *(drafter_command(options, i, port, small) for i, port in enumerate(drafters)),
            *(worker_command(options, i, scheduler, model) for i in range(options.workers)),
            gateway_command(options, grpc_port, http_port, scheduler),
        ]
        if options.metrics_targets is not None:
            services, told = targets.with_metrics(services, ports[own:])
            parts.enter_context(targets.written(options.metrics_targets, told))
        commands = [*redis, *services]
        ca = options.certs / "gateway" / "ca.crt" if options.certs else None
        stack = Stack(commands, f"{HOST}:{grpc_port}", f"{HOST}:{http_port}", scheduler, ca, emit)
        about = {"model": str(model), "workers": options.workers, "policy": options.policy}
        emit = partial(emit_entry, emit, "up")
        emit(json.dumps({"service": "up", **about, "event": "starting", "level": "info"}).encode() + b"\n")
        async with asyncio.TaskGroup() as tasks:
            changed = partial(_tell_targets, options, stack, emit)
            for child in stack.children:
                tasks.create_task(child.keep_running(), name=child.name).add_done_callback(lambda _: changed())
            workers = scaling.Workers(
                stack,
                tasks,
                partial(added_worker, options, scheduler, model),
                most=1 if options.processes > 1 else None,
                changed=changed,
            )
            try:
                async with workers.listening(grpc_port, emit):
                    await use(stack)
            finally:
                await stack.stop()


def scheduler_command(options: Options, port: int, redis_url: str, number: int = 0) -> Command:
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
    arguments += _given(tenants=options.tenants, event_log=options.event_log)
    if options.schedulers > 1:
        arguments.append("--standby")
    # Not a flag, since every user of the machine can list flags, and the URL may hold a password.
    environment = _further(options, "scheduler") | {"LAPS_SD_SCHEDULER_REDIS_URL": redis_url}
    return Command(f"{SCHEDULER}-{number}" if options.schedulers > 1 else SCHEDULER, arguments, environment)


def worker_command(options: Options, index: int, scheduler: str, model: Path) -> Command:
    options = replace(options, drafter=apart.nearest(options.drafter, index))
    return worker_named(f"worker-{index}", options, scheduler, model, _threads(options))


def drafter_command(options: Options, index: int, port: int, model: Path) -> Command:
    threads = _threads(options)
    arguments = [*_python("worker_service.drafting"), *apart.flags(options, port, model, threads)]
    environment = {**_WORKER_ENVIRONMENT, **_further(options, "drafter"), "OMP_NUM_THREADS": str(threads)}
    return Command(f"drafter-{index}", arguments + _tls(options, "drafter"), environment, up=b'"event": "ready"')


def _threads(options: Options) -> int:
    # Stages of a worker compute one after the other: each has all of the worker's cores.
    return max(1, cores() // (options.workers * options.devices + options.drafters))


def added_worker(options: Options, scheduler: str, model: Path, index: int, workers: int) -> Command:
    """Of a stack that runs already, and is to have so many workers."""
    command = worker_command(replace(options, workers=workers), index, scheduler, model)
    if options.metrics_targets is None:
        return command
    return replace(command, arguments=[*command.arguments, "--metrics-port", str(*claim_ports(0))])


def worker_named(
    name: str, options: Options, scheduler: str, model: Path, threads: int, *, joins: bool = False
) -> Command:
    """`joins`: a service that may not take it; then it ends."""
    arguments = ["--scheduler", scheduler, "--worker-id", name, "--model", str(model)]
    arguments += ["--dtype", options.dtype, "--slots", str(options.slots)]
    environment = {**_WORKER_ENVIRONMENT, **_further(options, "worker"), "OMP_NUM_THREADS": str(threads)}
    if options.engine == "vllm":
        arguments = [*vllm_python.command(options.vllm_python), *arguments]
        environment |= vllm_python.environment(options.vllm_args)
    else:
        arguments = [*_python("worker_service"), *arguments, "--device", options.device, "--weights", options.weights]
        # Workers of one machine may share a GPU, which one alone would take whole.
        environment.setdefault(_KV_TOKENS, os.environ.get(_KV_TOKENS) or "32768")
    arguments += ["--drafter", options.drafter, "--threads", str(threads)]
    arguments += _tls(options, "worker")
    arguments += ["--host", HOST, "--health-port", "0", "--log-level", options.log_level]
    arguments += ["--drain-s", str(WORKER_DRAIN_S)]
    arguments += _given(max_draft=options.draft_len, pace=options.pace)
    arguments += _given(kv_tokens=options.kv_tokens, host_kv_tokens=options.host_kv_tokens)
    if joins:
        arguments.append("--leave-if-refused")
    if options.stages > 1:
        arguments += ["--stages", str(options.stages), "--rendezvous", f"{HOST}:{claim_ports(0)[0]}"]
    if options.processes > 1:
        # torchrun's processes would outlive a torchrun that is killed, so each ends with torchrun (`leashed`).
        torchrun = _python(
            "torch.distributed.run", "--standalone", "--nproc-per-node", options.processes, "--no-python"
        )
        arguments = [*torchrun, *leashed(arguments, parent=0)]
    # A worker that dies after it has attached may have died of a request. The scheduler finds out which, so that is
    # no reason to give up.
    return Command(
        name,
        arguments,
        environment,
        stop_s=WORKER_DRAIN_S + DRAIN_SLACK_S,
        up=b'"event": "attached"',
        refused=b"exitcode  : 2 " if options.processes > 1 else None,  # torchrun's own exit code is 1 then
        left=LEFT.encode(),
    )


def gateway_command(options: Options, grpc_port: int, http_port: int, scheduler: str) -> Command:
    arguments = _python("gateway", "--host", HOST, "--grpc-port", grpc_port, "--http-port", http_port)
    arguments += ["--scheduler", scheduler, "--drain-s", str(options.drain_s), "--log-level", options.log_level]
    arguments += _tls(options, "gateway")
    arguments += _given(max_requests=options.max_requests, api_keys=options.api_keys)
    return Command("gateway", arguments, _further(options, "gateway"), stop_s=options.drain_s + DRAIN_SLACK_S)


def _further(options: Options, service: str) -> dict[str, str]:
    """What laps-sd.toml says of a service and no option does, as variables. What the environment sets counts more."""
    told = {
        f"LAPS_SD_{service.upper()}_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
        for name, value in options.services.get(service, {}).items()
    }
    return {name: value for name, value in told.items() if not os.environ.get(name)}


def _tell_targets(options: Options, stack: Stack, emit: Emit) -> None:
    """The services have changed."""
    if options.metrics_targets is None:
        return
    running = [child.command for child in stack.children if not (child.stopping or child.gone)]
    try:
        targets.write(options.metrics_targets, targets.addresses(running))
    except OSError as error:
        emit(b'{"service": "up", "event": "targets_not_written", "reason": %s}\n' % json.dumps(str(error)).encode())


def _given(**values: object) -> list[str]:
    """The flags of those that are not None."""
    told = ((f"--{name.replace('_', '-')}", str(value)) for name, value in values.items() if value is not None)
    return [word for pair in told for word in pair]


def _tls(options: Options, service: str) -> list[str]:
    if options.certs is None:
        return []
    folder = options.certs / service
    return ["--tls.ca", f"{folder}/ca.crt", "--tls.cert", f"{folder}/tls.crt", "--tls.key", f"{folder}/tls.key"]


def _python(module: str, *arguments: object) -> list[str]:
    """The command that runs a module. -P keeps the current folder, which may hold a `gateway`, off the module path."""
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]
