"""For how long the event loops of a scheduler and of a gateway are held at most, while what is hard on them happens:
many streams link again, workers come and go, questions are asked. Watching is in watched.py."""

import asyncio
import gzip
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from laps_sd.client import AsyncClient
from laps_sd.options import Options
from laps_sd.ports import HOST, claim_ports
from laps_sd.schedbench import watched
from laps_sd.schedbench.cells import CALM
from laps_sd.schedbench.gateways import Gateway, fill
from laps_sd.schedbench.peers import Start, running, start, stop
from laps_sd.schedbench.processes import Processes, children, serving, started, under, until
from laps_sd.schedbench.workers import CONTEXT_TOKENS, MODEL, Worker
from laps_sd.scratch import scratch
from laps_sd.stack import gateway_command
from protos.link.v1 import common_pb2
from protos.link.v1.gateway_link_pb2_grpc import GatewayLinkStub
from protos.serving import channel
from protos.v1 import inference_pb2

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


class Watch:
    """One watched service: the words of a command that run it, and its figures."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, file = name, folder / name
        file.write_bytes(bytes(watched.NAME.stop))
        self.words = [sys.executable, "-P", watched.__file__, str(file)]
        self.figures = watched.Figures(file)

    def held(self) -> dict[str, Any]:
        """For how long the service's event loop was held at most since the figures were reset."""
        names = ("turn_ms", "turn_cpu_ms", "call_cpu_ms", "collected_cpu_ms")
        longest_ms = {name: 1000 * seconds for name, seconds in zip(names, self.figures.values, strict=False)}
        return longest_ms | {"call": self.figures.name}


class Relay:
    """Forwards connections to `target` until they are cut: a network between a gateway and its scheduler."""

    def __init__(self, target: str) -> None:
        self._host, self._port = target.rsplit(":", 1)
        self._writers: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def serving(self, port: int) -> AsyncIterator[None]:
        async with await asyncio.start_server(self._relay, HOST, port):
            yield
            await self.cut()

    async def cut(self) -> None:
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


async def measure(options: Options, scale: Scale) -> list[dict[str, Any]]:
    """What each event did to both services. Raises ConnectionError, GaveUp or NoServer."""
    with scratch() as folder:
        watches = [Watch(folder, "scheduler"), Watch(folder, "gateway")]
        async with started(options, scale.live, watch=watches[0].words) as processes:
            return await _with_gateway(options, scale, processes, watches)


async def _with_gateway(
    options: Options, scale: Scale, processes: Processes, watches: Sequence[Watch]
) -> list[dict[str, Any]]:
    model, relay = large_model(), Relay(processes.target)
    relay_port, grpc_port, http_port = claim_ports(0, 0, 0)
    options = replace(options, max_requests=2 * scale.streams, drain_s=0.0)
    command = under(watches[1].words, gateway_command(options, grpc_port, http_port, f"{HOST}:{relay_port}"))
    *workers, late = (Worker(processes.target, number, scale.slots, model) for number in range(scale.workers + 1))
    gateways = [Gateway(processes.target, 0, number, 1, scale.gateways) for number in range(1, scale.gateways)]
    async with relay.serving(relay_port), children(command), running(workers, gateways) as begin:
        await serving(f"{HOST}:{grpc_port}", PUBLIC)
        async with AsyncClient(f"{HOST}:{grpc_port}", ca="") as client:
            for number in range(scale.streams):
                begin(_stream(client, number))
            round_s = await _rounds(workers, scale)
            await fill(gateways, scale.live - scale.streams)
            for worker in workers:
                worker.round_s = round_s / CALM
            start(workers)
            stalls = []
            for event, happens in _events(processes.target, relay, late, begin).items():
                for watch in watches:
                    watch.figures.reset()
                await happens()
                await asyncio.sleep(scale.seconds)
                held = {watch.name: watch.held() for watch in watches}
                stalls.append({**asdict(scale), "event": event, **held})
    return stalls


async def _stream(client: AsyncClient, number: int) -> None:
    chunks = client.generate(
        "word-1 word-2",
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        request_id=f"stream-{number}",
        on_disconnect="detach",
    )
    async for _ in chunks:
        pass


async def _rounds(workers: Sequence[Worker], scale: Scale) -> float:
    """Run until the streams have their rounds; returns how long a worker needs for one. Then the workers stand."""
    start(workers)
    began_s = time.perf_counter()

    async def enough() -> bool:
        return sum(worker.rounds for worker in workers) >= scale.rounds * scale.workers

    await until(enough, f"no {scale.rounds} rounds of each worker", ALL_ROUNDS_S)
    stop(workers)
    return (time.perf_counter() - began_s) / scale.rounds


def _events(target: str, relay: Relay, late: Worker, begin: Start) -> dict[str, Callable[[], Awaitable[object]]]:
    """What is hard on the loops, in the order in which it is done: a worker must have attached to be lost."""
    attached: list[asyncio.Task[None]] = []

    async def attach() -> None:
        late.go.set()
        attached.append(begin(late.run()))
        await late.attached.wait()

    async def leave() -> None:
        attached[0].cancel()

    async def ask_stats() -> None:
        async with channel(target) as link:
            for _ in range(QUESTIONS // 10):
                await GatewayLinkStub(link).Stats(inference_pb2.StatsRequest())
                for page in ("", "9000"):
                    asked = inference_pb2.ListRequestsRequest(page_size=256, page_token=page)
                    await GatewayLinkStub(link).ListRequests(asked)

    async def ask_requests() -> None:
        async with channel(target) as link:
            stub = GatewayLinkStub(link)
            ids = [f"request-1-{number % 10}" for number in range(QUESTIONS)]
            asked = [stub.GetRequest(inference_pb2.GetRequestRequest(request_id=id)) for id in ids]
            await asyncio.gather(*asked, return_exceptions=True)  # those that have ended long ago are unknown

    return {
        "serving": lambda: asyncio.sleep(0),
        "the gateway's streams link again": relay.cut,
        "a worker attaches": attach,
        "a worker is lost": leave,
        "Stats": ask_stats,
        "GetRequest": ask_requests,
    }
