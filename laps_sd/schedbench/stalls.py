"""For how long the event loops of a scheduler and of a gateway are held at most, while what is hard on them happens:
many streams link again, workers come and go, questions are asked, garbage is collected. Watching is in watched.py."""

import asyncio
import gzip
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tenacity import AsyncRetrying, stop_after_delay, wait_fixed

from laps_sd.client import Client
from laps_sd.schedbench import watched
from laps_sd.schedbench.cells import CALM, start, stop
from laps_sd.schedbench.gateways import Gateway, fill
from laps_sd.schedbench.processes import READY_S, Processes, children, serving, started, under
from laps_sd.schedbench.workers import CONTEXT_TOKENS, MODEL, Worker
from laps_sd.stack import HOST, Options, claim_ports, gateway_command
from protos.link.v1 import common_pb2
from protos.link.v1.gateway_link_pb2_grpc import GatewayLinkStub
from protos.serving import channel
from protos.v1 import inference_pb2, types_pb2

# Of the table: headings, and how a Stall fills them.
COLUMNS = {
    "event": "{0.event}",
    "scheduler: turn, of CPU ms": "{0.scheduler.turn_ms:.1f}, {0.scheduler.turn_cpu_ms:.1f}",
    "longest call": "{0.scheduler.call_cpu_ms:.1f} {0.scheduler.call}",
    "gateway: turn, of CPU ms": "{0.gateway.turn_ms:.1f}, {0.gateway.turn_cpu_ms:.1f}",
    "longest call ": "{0.gateway.call_cpu_ms:.1f} {0.gateway.call}",
}
PUBLIC = "laps_sd.v1.Inference"
VOCABULARY = 128_000  # with its tokenizer of 3 MB, as those of large models
MAX_TOKENS = CONTEXT_TOKENS // 2  # of a stream: none ends while it is measured
ALL_ROUNDS_S = 300.0  # for the rounds that make the streams long
QUESTIONS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """`live` requests; `streams` of them come through a real gateway, and have `rounds` rounds before anything is
    measured. The others come through scripted gateways, `gateways` in all. Each event is watched for `seconds`."""

    live: int = 10_000
    gateways: int = 100
    streams: int = 1_000
    rounds: int = 300
    slots: int = 32
    seconds: float = 3.0

    @property
    def workers(self) -> int:
        return -(-self.streams // self.slots)


@dataclass(frozen=True, slots=True)
class Held:
    """For how long the event loop of one service was held at most, in milliseconds."""

    turn_ms: float  # the longest turn
    turn_cpu_ms: float  # the same in CPU time of the loop's thread, which does not grow when the machine is busy
    call_cpu_ms: float  # the longest single call within a turn
    call: str  # where that is in the code
    collected_ms: float  # the longest garbage collection


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall(Scale):
    """What an event did to both services."""

    event: str
    scheduler: Held
    gateway: Held


class Watch:
    """One watched service: the words of a command that run it, and its figures."""

    def __init__(self, folder: Path, name: str) -> None:
        file = folder / name
        file.write_bytes(bytes(watched.NAME.stop))
        self.words = [sys.executable, "-P", watched.__file__, str(file)]
        self.figures = watched.Figures(file)

    async def collect(self) -> None:
        """A full garbage collection. Raises ConnectionError if the loop does not come to it."""
        self.figures.values[watched.COLLECT] = 1.0
        async for attempt in AsyncRetrying(stop=stop_after_delay(READY_S), wait=wait_fixed(0.01), reraise=True):
            with attempt:
                if self.figures.values[watched.COLLECT]:
                    raise ConnectionError(f"a loop has had no turn for {READY_S:g} s")

    def held(self) -> Held:
        """Since the figures were reset."""
        turn_s, turn_cpu_s, call_cpu_s, collected_s, _ = self.figures.values
        name = self.figures.name
        return Held(1000 * turn_s, 1000 * turn_cpu_s, 1000 * call_cpu_s, name, 1000 * collected_s)


class Relay:
    """Forwards connections to `target` until they are cut: a network between a gateway and its scheduler."""

    def __init__(self, target: str) -> None:
        self._host, self._port = target.rsplit(":", 1)
        self._writers: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def serving(self, port: int) -> AsyncIterator[None]:
        async with await asyncio.start_server(self._relay, HOST, port):
            yield
            self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, back = await asyncio.open_connection(self._host, int(self._port))
        both = {writer, back}
        self._writers |= both
        try:
            await asyncio.gather(_copy(reader, back), _copy(onward, writer))
        except OSError:
            pass  # cut
        finally:
            self._writers -= both
            for each in both:
                each.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


def large_model() -> common_pb2.ModelInfo:
    """A model without weights, whose tokenizer is as large as a real one's."""
    words = {f"word-{number}": number for number in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "word-0"},
    }
    model = common_pb2.ModelInfo()
    model.CopyFrom(MODEL)
    model.vocab_size = VOCABULARY
    model.tokenizer_json = gzip.compress(json.dumps(tokenizer, indent=1).encode(), compresslevel=0)
    return model


async def measure(options: Options, scale: Scale) -> list[Stall]:
    """Raises ConnectionError, GaveUp or NoServer."""
    with tempfile.TemporaryDirectory(prefix="laps-sd-") as name:
        watches = [Watch(Path(name), "scheduler"), Watch(Path(name), "gateway")]
        async with started(options, scale.live, watch=watches[0].words) as processes:
            return await _with_gateway(options, scale, processes, watches)


async def _with_gateway(options: Options, scale: Scale, processes: Processes, watches: Sequence[Watch]) -> list[Stall]:
    model, relay = large_model(), Relay(processes.target)
    relay_port, grpc_port, http_port = claim_ports(0, 0, 0)
    options = replace(options, max_requests=2 * scale.streams, drain_s=0.0)
    command = under(watches[1].words, gateway_command(options, grpc_port, http_port, f"{HOST}:{relay_port}"))
    async with relay.serving(relay_port), children(command), asyncio.TaskGroup() as tasks:
        workers = [Worker(processes.target, number, scale.slots, model) for number in range(scale.workers)]
        running = [tasks.create_task(worker.run()) for worker in workers]
        await asyncio.gather(*(worker.attached.wait() for worker in workers))
        await serving(f"{HOST}:{grpc_port}", PUBLIC)
        async with Client(f"{HOST}:{grpc_port}") as client:
            running += [tasks.create_task(_stream(client, number)) for number in range(scale.streams)]
            round_s = await _rounds(workers, scale)
            gateways = [Gateway(processes.target, 0, number, 1, scale.gateways) for number in range(1, scale.gateways)]
            running += [tasks.create_task(gateway.run()) for gateway in gateways]
            await fill(gateways, scale.live - scale.streams)
            for worker in workers:
                worker.round_s = round_s / CALM
            start(workers)
            late = Worker(processes.target, scale.workers, scale.slots, model)
            stalls = [
                await _watch(event, happens, scale, watches)
                for event, happens in _events(processes, relay, late, watches, tasks)
            ]
            for task in running:
                task.cancel()
    return stalls


async def _stream(client: Client, number: int) -> None:
    chunks = client.generate(
        "word-1 word-2",
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        request_id=f"stream-{number}",
        on_disconnect=types_pb2.ON_DISCONNECT_DETACH,
    )
    async for _ in chunks:
        pass


async def _rounds(workers: Sequence[Worker], scale: Scale) -> float:
    """Run until the streams have their rounds; returns how long a worker needs for one. Then the workers stand."""
    start(workers)
    began_s, enough = time.perf_counter(), scale.rounds * scale.workers
    async for attempt in AsyncRetrying(stop=stop_after_delay(ALL_ROUNDS_S), wait=wait_fixed(0.05), reraise=True):
        with attempt:
            if (done := sum(worker.rounds for worker in workers)) < enough:
                raise ConnectionError(f"{done} of {enough} rounds within {ALL_ROUNDS_S:g} s")
    stop(workers)
    return (time.perf_counter() - began_s) / scale.rounds


Happens = Callable[[], Awaitable[object]]


def _events(
    processes: Processes, relay: Relay, late: Worker, watches: Sequence[Watch], tasks: asyncio.TaskGroup
) -> list[tuple[str, Happens]]:
    attached: list[asyncio.Task[None]] = []

    async def nothing() -> None:
        pass

    async def cut() -> None:
        relay.cut()

    async def attach() -> None:
        late.go.set()
        attached.append(tasks.create_task(late.run()))
        await late.attached.wait()

    async def leave() -> None:
        attached[0].cancel()

    async def ask_stats() -> None:
        async with channel(processes.target) as link:
            for _ in range(QUESTIONS // 10):
                await GatewayLinkStub(link).Stats(inference_pb2.StatsRequest())
                await GatewayLinkStub(link).ListRequests(inference_pb2.ListRequestsRequest(page_size=256))

    async def ask_requests() -> None:
        async with channel(processes.target) as link:
            stub = GatewayLinkStub(link)
            ids = [f"request-1-{number % 10}" for number in range(QUESTIONS)]
            asked = [stub.GetRequest(inference_pb2.GetRequestRequest(request_id=id)) for id in ids]
            await asyncio.gather(*asked, return_exceptions=True)  # those that have ended long ago are unknown

    async def collect() -> None:
        for watch in watches:
            await watch.collect()

    return [
        ("serving", nothing),
        ("the gateway's streams link again", cut),
        ("a worker attaches", attach),
        ("a worker is lost", leave),
        ("Stats", ask_stats),
        ("GetRequest", ask_requests),
        ("garbage collection", collect),
    ]


async def _watch(event: str, happens: Happens, scale: Scale, watches: Sequence[Watch]) -> Stall:
    for watch in watches:
        watch.figures.reset()
    await happens()
    await asyncio.sleep(scale.seconds)
    scheduler, gateway = (watch.held() for watch in watches)
    return Stall(**asdict(scale), event=event, scheduler=scheduler, gateway=gateway)
