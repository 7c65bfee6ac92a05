"""The gateway's costs: time added to a first token, CPU for each relayed chunk, memory for each open stream. The
gateway, the scheduler's stub and the clients are processes of their own. Added to a first token: how much longer a
client of the gateway waits than one that asks the scheduler itself, at the same time."""

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil

from laps_sd.gatewaybench.load import Reader, connect, open_streams, straight
from laps_sd.ports import HOST, claim_ports
from laps_sd.schedbench.processes import children, serving, used_s
from laps_sd.supervise import Command, leashed
from protos.serving import address

SERVICE = "laps_sd.v1.Inference"
ENDLESS = 8000  # tokens of a stream, as many as the stub's context can hold: none may end while it is measured
UP_S = 30.0
SETTLE_S = 1.0
PROBE_EVERY_S = 0.03
STRAIGHT_EVERY = 4  # after so many probes of the gateway
FEWEST = 2  # probes, on however slow a machine: fewer have no percentiles


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` are open, each gets `rounds_per_s` rounds of `tokens_per_round` tokens. `many`: opened for memory; each
    of these lasts `many_s`."""

    streams: int = 200
    rounds_per_s: float = 20.0
    tokens_per_round: int = 2
    many: int = 2000
    many_s: int = 20
    seconds: float = 10.0

    def __post_init__(self) -> None:
        """Raises ValueError if streams would end while they are measured."""
        tokens = self.rounds_per_s * self.tokens_per_round * (SETTLE_S + 2 * self.seconds)
        if tokens > ENDLESS:
            raise ValueError(f"a stream would need {tokens:,.0f} tokens, and has {ENDLESS:,}")


async def measure(load: Load, model: Path) -> dict[str, Any]:
    """Raises ConnectionError, or a group with GaveUp."""
    most = 2 * max(load.streams, load.many)
    async with gateway_of_stub(load.rounds_per_s, load.tokens_per_round, most, model) as (port, gateway, stub):
        streams = await open_streams(port, load.streams, ENDLESS)
        await asyncio.sleep(SETTLE_S)
        relayed = await _relayed(load, gateway, streams)
        async with straight(stub) as ask:
            asked = await _asked(load, port, ask, gateway, streams, relayed["chunks_per_cpu_s"])
        problems = asked["problems"] + sum(each.over.done() for each in streams)
        _hang_up(streams)
    async with gateway_of_stub(1.0, load.tokens_per_round, most, model, hold=load.many) as (port, gateway, _):
        return {"streams": load.streams} | relayed | asked | {"problems": problems} | await _many(load, port, gateway)


async def _relayed(load: Load, gateway: psutil.Process, streams: Sequence[Reader]) -> dict[str, Any]:
    """The streams are read, and nobody asks for anything: a request costs as much as many chunks."""
    begun_s, used, events = time.perf_counter(), used_s(gateway), _events(streams)
    wall_s = cpu_s = relayed = 0.0
    while not (relayed and cpu_s) and wall_s < UP_S:  # once, unless the gateway got no processor
        await asyncio.sleep(load.seconds)
        wall_s, cpu_s = time.perf_counter() - begun_s, used_s(gateway) - used
        relayed = _events(streams) - events
    return {
        "chunks_per_s": relayed / wall_s,
        "gateway_busy": cpu_s / wall_s,
        "chunks_per_cpu_s": relayed / cpu_s if cpu_s else 0.0,
    }


async def _asked(
    load: Load,
    port: int,
    ask_straight: Callable[[], Awaitable[float]],
    gateway: psutil.Process,
    streams: Sequence[Reader],
    chunks_per_cpu_s: float,
) -> dict[str, Any]:
    """The streams are read on while requests, one after the other, ask for a single token: of the gateway, and now and
    then of the scheduler itself."""
    until_s, used, events = time.perf_counter() + load.seconds, used_s(gateway), _events(streams)
    ttfts_s, straight_s, problems = list[float](), list[float](), 0
    while time.perf_counter() < until_s or len(ttfts_s) + problems < FEWEST:
        probe = await connect(port, 1)
        probe.ask()
        await asyncio.wait_for(probe.over, UP_S)
        if probe.problem:
            problems += 1
        else:
            ttfts_s.append(probe.ttft_s)
        await asyncio.sleep(PROBE_EVERY_S)
        if len(straight_s) * STRAIGHT_EVERY < len(ttfts_s):
            straight_s.append(await asyncio.wait_for(ask_straight(), UP_S))
            await asyncio.sleep(PROBE_EVERY_S)
    if len(ttfts_s) < FEWEST:
        raise ConnectionError(f"{problems} requests failed beside the streams, {len(ttfts_s)} did not")
    for_chunks_s = (_events(streams) - events) / chunks_per_cpu_s if chunks_per_cpu_s else 0.0
    percentiles, least_s = percentiles_of(ttfts_s), median(straight_s)
    return {
        "probes": len(ttfts_s),
        "ttft_p50_ms": percentiles[49] * 1000,
        "straight_ttft_p50_ms": least_s * 1000,
        "added_ttft_p50_ms": (percentiles[49] - least_s) * 1000,
        "added_ttft_p99_ms": (percentiles[98] - least_s) * 1000,
        "cpu_ms_per_request": (used_s(gateway) - used - for_chunks_s) / len(ttfts_s) * 1000,
        "problems": problems,
    }


def percentiles_of(values: Sequence[float]) -> list[float]:
    """From the first to the 99th, of two values or more. None is beyond the values."""
    return quantiles(values, n=100, method="inclusive")


def _events(streams: Sequence[Reader]) -> int:
    return sum(each.events for each in streams)


async def _many(load: Load, port: int, gateway: psutil.Process) -> dict[str, Any]:
    """Memory of streams that are open at once; then all of them end."""
    warm = await open_streams(port, min(50, load.many), ENDLESS)  # what the first streams cost once
    _hang_up(warm)
    await asyncio.sleep(SETTLE_S)
    before = gateway.memory_info().rss
    tokens = load.tokens_per_round * (load.many_s + 1)  # one round at once, then one a second
    readers = await open_streams(port, load.many, tokens)
    open_at_once = sum(not each.over.done() for each in readers)
    memory = gateway.memory_info().rss - before
    await asyncio.wait([each.over for each in readers], timeout=UP_S + 3 * load.many_s)
    whole = sum(each.over.done() and not each.problem for each in readers)
    return {"many": load.many, "open_at_once": open_at_once, "whole": whole, "bytes_per_stream": memory / load.many}


def _hang_up(readers: Sequence[Reader]) -> None:
    for reader in readers:
        reader.hang_up()


@asynccontextmanager
async def gateway_of_stub(
    rounds_per_s: float, tokens_per_round: int, most: int, model: Path, hold: int = 0
) -> AsyncIterator[tuple[int, psutil.Process, str]]:
    """A gateway of the stub, ready: its HTTP port, its process and the stub's address. `most`: requests that may be
    live. `hold`: no stream gets a second round before so many are open."""
    grpc_port, http_port = claim_ports(0, 0)
    stub = await asyncio.create_subprocess_exec(
        *leashed([sys.executable, "-P", "-m", "laps_sd.gatewaybench.stub", "--model", str(model)]),
        *("--rounds-per-s", str(rounds_per_s), "--tokens-per-round", str(tokens_per_round), "--hold", str(hold)),
        stdout=subprocess.PIPE,
    )
    try:
        assert stub.stdout is not None
        said = await asyncio.wait_for(stub.stdout.readline(), UP_S)
        if not re.fullmatch(rb"\d+\n", said):
            raise ConnectionError("the stub of a scheduler did not start")
        flags = ["--host", HOST, "--grpc-port", str(grpc_port), "--http-port", str(http_port), "--log-level", "warning"]
        flags += ["--scheduler", address(HOST, int(said)), "--max-requests", str(most), "--drain-s", "0"]
        command = Command("gateway", [sys.executable, "-P", "-m", "gateway", *flags])
        async with children(command) as (child,):
            await serving(address(HOST, grpc_port), SERVICE)
            yield http_port, psutil.Process(child.pid), address(HOST, int(said))
    finally:
        if stub.returncode is None:
            stub.kill()
            await stub.wait()
