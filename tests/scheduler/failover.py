"""Fail-overs of Redis under load (`python -m tests.scheduler.failover`, `make test-failover`): two scheduler processes,
real Sentinels and replicas, real links, no model.

Four streams run for ever, and requests come all the time. Each fail-over is one of KINDS. Told are seconds from the
blow to the next token of every stream, and how many requests were lost that had been accepted. A token that is lost,
repeated or changed, or a request that is lost although a replica was to have it, ends the run with 1.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count, cycle, islice
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
from grpc.aio import AioRpcError

from protos.errors import RequestError
from protos.v1.inference_pb2 import StatsRequest
from scheduler_service.store import RedisStore
from tests.scheduler.redis_group import Group, Node, redis_group
from tests.scheduler.takeover import Bench, Listener, benched, submission
from tests.waiting import until

KINDS = {
    "kill": "the primary is killed, and comes back as a replica",
    "replace": "a Sentinel is told to make another server the primary; the old one takes writes for some seconds",
    "both": "replicas are cut off; LAG_S later the primary and the leader are killed at once",
    "freeze": "the primary stands still, and comes back taking itself for the primary",
}
TURNS = ("kill", "replace", "both", "kill", "replace", "kill", "both", "replace", "kill", "freeze")
LAG_S = 0.3
REQUEST_EVERY_S = 0.04
MORE_TOKENS = 5  # of each stream, until it counts as going on
STILL_S = 120.0  # for everything to be whole again


class Submitter:
    """Submits requests that wait for ever, and takes note of those that are accepted."""

    def __init__(self, bench: Bench) -> None:
        self._link, self._numbers = bench.links[0], count(1000)
        self.accepted: list[str] = []
        self.refused: list[str] = []
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Until `stop`; then returns once each is accepted or refused."""
        self._stopped.clear()
        async with asyncio.TaskGroup() as asking:
            while not self._stopped.is_set():
                asking.create_task(self._submit(f"request-{next(self._numbers)}"))
                await asyncio.sleep(REQUEST_EVERY_S)

    async def _submit(self, id: str) -> None:
        request = submission(7, prompt=8)
        request.request_id = id
        try:
            await self._link.submit(request).until_accepted()
            self.accepted.append(id)
        except RequestError as error:
            self.refused.append(f"{id}: {error.message}")

    def stop(self) -> None:
        self._stopped.set()

    def cancel(self) -> None:
        for id in self.accepted:
            self._link.cancel(id)
        self.accepted = []


async def blow(kind: str, group: Group, bench: Bench) -> float:
    """Returns the time at which it struck, once there is a new primary and every process runs again."""
    old = await group.primary()
    assert old is not None
    if kind == "replace":
        await group.replace()
        at = time.monotonic()
        await group.moved(old)
    elif kind == "freeze":
        old.freeze()
        at = time.monotonic()
        try:
            await group.moved(old)
        finally:
            old.thaw()
    else:
        first, second = bench.schedulers
        leader = first if await first.leads() else second
        if kind == "both":
            await _cut_off(group, old)
        at = time.monotonic()
        old.kill()
        if kind == "both":
            await leader.kill()
            for each in group.replicas(old):
                each.thaw()
            await leader.start()
        new = await group.moved(old)
        await old.start("--replicaof", "127.0.0.1", str(new.port))
    return at


async def _cut_off(group: Group, primary: Node) -> None:
    for each in group.replicas(primary):
        each.freeze()
    await primary.ask("CLIENT KILL TYPE replica")  # what is on its way would still reach them
    await asyncio.sleep(LAG_S)


async def until_all_go_on(bench: Bench, listeners: list[Listener], since: float) -> float:
    """Seconds from `since` on until the slowest stream had MORE_TOKENS that came after now."""
    before = [listener.tokens for listener in listeners]

    async def all_go_on() -> bool:
        for task in bench.running:
            if task.done():
                task.result()  # a listener that found a token wrong
        return all(each.tokens >= had + MORE_TOKENS for each, had in zip(listeners, before, strict=True))

    await until(all_go_on, STILL_S)
    return time.monotonic() - since


@asynccontextmanager
async def explained(group: Group, bench: Bench) -> AsyncIterator[None]:
    """Where something stands still for too long the servers are asked before they end, for it may be they; then the
    leader, and what the worker was told last."""
    try:
        yield
    except TimeoutError:
        print(await group.says(), bench.talker.says(), sep="\n", file=sys.stderr)  # noqa: T201
        with suppress(RequestError, AioRpcError, TimeoutError):
            async with asyncio.timeout(5.0):
                print(await bench.links[0].scheduler.stats(StatsRequest()), file=sys.stderr)  # noqa: T201
        raise


async def lost(store: RedisStore, ids: list[str]) -> int:
    """How many of them Redis does not know."""
    return sum([found is None for at in range(0, len(ids), 64) for found in await store.read(ids[at : at + 64])])


async def measure(failovers: int, replicas: int, minutes: float, logs: Path | None) -> dict[str, Any]:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # silence
    pauses: dict[str, list[float]] = defaultdict(list)
    losses: dict[str, int] = defaultdict(int)
    ends_at = time.monotonic() + 60 * minutes
    accepted, refused = 0, []
    with tempfile.TemporaryDirectory() as folder:
        async with redis_group(Path(folder), "failover") as group:
            more = ("--redis-replicas", str(replicas))
            async with (
                benched(group.url, "failover", 1, *more, lease_s=1.5, logs=logs) as bench,
                explained(group, bench),
            ):
                store = RedisStore(group.url, namespace="failover")
                listeners = await bench.submit(0, prompt=8)
                bench.run(*listeners)
                submitter = Submitter(bench)
                for kind in islice(cycle(TURNS), failovers):
                    if time.monotonic() > ends_at:
                        break
                    submitting = asyncio.create_task(submitter.run())
                    at = await blow(kind, group, bench)
                    pauses[kind].append(await until_all_go_on(bench, listeners, at))
                    submitter.stop()
                    async with asyncio.timeout(STILL_S):
                        await submitting
                    await until(group.whole, STILL_S)
                    losses[kind] += await lost(store, submitter.accepted)
                    accepted += len(submitter.accepted)
                    refused += submitter.refused
                    submitter.refused = []
                    submitter.cancel()
                    print(f"{sum(map(len, pauses.values()))}: {kind} {pauses[kind][-1]:.1f} s", file=sys.stderr)  # noqa: T201
                await store.close()
                for listener in bench.running:
                    if listener.done():
                        listener.result()
    return {
        "failovers": sum(map(len, pauses.values())),
        "replicas_waited_for": replicas,
        "pause_s": {kind: _spread(sorted(each)) for kind, each in pauses.items()},
        "accepted": accepted,
        "lost": dict(losses),
        "refused": len(refused),  # nobody was told that these were accepted
        "tokens": sum(listener.tokens for listener in listeners),
        "recomputed": bench.talker.recomputed,
    }


def _spread(ordered: list[float]) -> dict[str, float]:
    return {"count": len(ordered), "p50": round(ordered[len(ordered) // 2], 2), "max": round(ordered[-1], 2)}


def main(
    failovers: Annotated[int, typer.Option(min=1)] = 200,
    replicas: Annotated[int, typer.Option(min=0, max=2, help="That must have a commit before it is told.")] = 1,
    minutes: Annotated[float, typer.Option(help="No fail-over begins after so long.")] = 60.0,
    logs: Annotated[Path | None, typer.Option(help="A folder for what both schedulers log.")] = None,
) -> None:
    told = asyncio.run(measure(failovers, replicas, minutes, logs))
    print(json.dumps(told, indent=2))  # noqa: T201
    if replicas and sum(told["lost"].values()):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
