"""Measures take-over (`python -m tests.scheduler.takeover`): two scheduler processes, real links, no model.

Thousands of requests wait, some run; the leader is killed with SIGKILL, again and again. Told are seconds from the kill
to the first token after it, and to when all that wait are known to the new leader; no token may be lost or repeated.
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer

from gateway.feed import Feed
from gateway.link import Link as GatewayLink
from protos.link.v1 import common_pb2, gateway_link_pb2, worker_link_pb2
from protos.tls import Tls
from protos.v1 import inference_pb2, types_pb2
from tests.conftest import redis_server
from tests.gateway.harness import model_info
from tests.scheduler.pair import SchedulerProcess, pair
from tests.waiting import until
from worker_service.engine.types import Admission, CostProfile, Held, Row
from worker_service.link import Link as WorkerLink
from worker_service.reporting import Report, Seconds
from worker_service.runner import Command

ROUND_S = 0.02
SLOTS = 4
PER_GATEWAY = 1000
CONTEXT = 1 << 24
LATE_S = 60.0


@dataclass
class Talker:
    """In place of worker_service.runner: the token after n others is n % 1000, and KV is kept as an engine keeps it."""

    cost: CostProfile = field(default_factory=lambda: CostProfile(0.0, ROUND_S, 0.0, 0.0, 0.0))
    known: dict[str, Admission] = field(default_factory=dict)
    output: dict[str, int] = field(default_factory=dict)  # tokens, by request with KV
    recomputed: int = 0  # requests that were admitted with output and without KV
    _report: Callable[[Report], None] | None = None
    _schedule: list[str] = field(default_factory=list)

    def detach(self) -> Future[list[Held]]:
        self._report, self._schedule = None, []
        held: Future[list[Held]] = Future()
        held.set_result([Held(id, self.known[id].placement, tokens, 1) for id, tokens in self.output.items()])
        return held

    def attach(self, max_lag: int, report: Callable[[Report], None]) -> None:
        self._report, self._max_lag, self._step = report, max_lag, 0

    def post(self, command: Command) -> None:
        for id in command.forget:
            self.known.pop(id, None)
            self.output.pop(id, None)
        for admission in command.admit:
            id, tokens = admission.request_id, len(admission.tokens) - admission.prompt_len
            self.recomputed += tokens > 0 and id not in self.output
            self.known[id], self.output[id] = admission, tokens
        self._schedule = [run.request_id for run in command.schedule][:SLOTS]
        self._seq, self._seen = command.seq, command.seen_step

    def says(self) -> str:
        """Why it runs, or does not."""
        if self._report is None:
            return "the worker has no leader"
        return f"the worker runs {self._schedule}, {self._step - self._seen} of {self._max_lag} steps ahead"

    async def run(self) -> None:
        while True:
            await asyncio.sleep(ROUND_S)
            if self._report is None or not self._schedule or self._step - self._seen >= self._max_lag:
                continue
            rows = []
            for id in self._schedule:
                start = self.output[id]
                rows.append(Row(id, self.known[id].placement, start, (start % 1000,), blocks=1))
                self.output[id] += 1
            self._step += 1
            self._report(Report(self._step, self._seq, 10**6, [[row] for row in rows], seconds=Seconds(verify=ROUND_S)))


class Listener:
    """A client of one running request: every token in order, once."""

    def __init__(self, link: GatewayLink, feed: Feed) -> None:
        self.link, self.feed, self.last_at, self.tokens = link, feed, 0.0, 0

    async def run(self) -> None:
        while True:
            batch = await self.link.take(self.feed)  # which asks for more whenever a follow brought all it was to
            for number, token in enumerate(batch.tokens):
                assert token == (self.tokens + number) % 1000, "a token is lost or repeated"
            self.tokens += len(batch.tokens)
            self.last_at = asyncio.get_running_loop().time()


def submission(number: int, prompt: int) -> gateway_link_pb2.Submit:
    return gateway_link_pb2.Submit(
        request_id=f"request-{number}",
        prompt=[number % 1000] * prompt,
        limits=common_pb2.Limits(max_tokens=CONTEXT // 2),
        on_disconnect=types_pb2.ON_DISCONNECT_DETACH,
    )


@dataclass
class Bench:
    schedulers: tuple[SchedulerProcess, SchedulerProcess]
    talker: Talker
    tasks: asyncio.TaskGroup
    running: list["asyncio.Task[None]"] = field(default_factory=list)
    links: list[GatewayLink] = field(default_factory=list)
    ready_at: dict[int, float] = field(default_factory=dict)  # since when each gateway has a leader with a worker

    def run(self, *those: Any) -> None:
        """Each of them, until the end."""
        self.running += [self.tasks.create_task(each.run()) for each in those]

    async def waiting(self) -> int:
        return int((await self.links[0].scheduler.stats(inference_pb2.StatsRequest())).waiting)

    async def submit(self, waiting: int, prompt: int) -> list[Listener]:
        """The first `SLOTS` run, for ever; the others wait."""
        feeds = []
        for number in range(SLOTS + waiting):
            feeds.append(self.links[number // PER_GATEWAY].submit(submission(number, prompt)))
            if number % 100 == 99:
                await feeds[-1].until_accepted()
        await asyncio.gather(*(feed.until_accepted() for feed in feeds))
        return [Listener(self.links[0], feed) for feed in feeds[:SLOTS]]

    async def kill_leader(self, waiting: int, listeners: list[Listener]) -> tuple[float, float]:
        """Seconds until the first token after it, and until all that wait are read."""
        clock = asyncio.get_running_loop().time
        leader, standby = self.schedulers if await self.schedulers[0].leads() else self.schedulers[::-1]
        killed_at = clock()
        await leader.kill()

        async def goes_on() -> bool:
            back_at = self.ready_at.get(0, 0.0)
            return back_at > killed_at and all(listener.last_at > back_at for listener in listeners)

        await until(goes_on, LATE_S)
        first_token_s = max(listener.last_at for listener in listeners) - killed_at

        async def all_read() -> bool:
            return await self.waiting() == waiting

        await until(all_read, LATE_S)
        all_read_s = clock() - killed_at
        await leader.start()
        assert await standby.leads()
        return first_token_s, all_read_s


@asynccontextmanager
async def benched(
    redis_url: str, namespace: str, gateways: int, *more: str, lease_s: float = 3.0, logs: Path | None = None
) -> AsyncIterator[Bench]:
    """A pair of schedulers, and over real links a talker and so many gateways."""
    model = model_info(context_tokens=CONTEXT)
    flags = ("--policy", "fcfs", "--max-live-tokens", str(10**12), "--max-backlog-s", "inf", *more)
    async with (
        pair(redis_url, namespace, *flags, lease_s=lease_s, logs=logs) as schedulers,
        asyncio.TaskGroup() as tasks,
    ):
        targets = [each.target for each in schedulers]
        bench = Bench(schedulers, talker := Talker(), tasks)

        async def on_attached(attached: bool) -> None:
            return

        def noting(number: int) -> Any:
            async def on_ready() -> None:
                if bench.links[number].ready:
                    bench.ready_at[number] = asyncio.get_running_loop().time()

            return on_ready

        worker = WorkerLink(
            targets,
            tls=Tls(),
            runner=talker,  # type: ignore[arg-type]
            hello=worker_link_pb2.Hello(worker_id="talker", model=model, slots=SLOTS, blocks=10**6, block_tokens=16),
            on_attached=on_attached,
        )
        for number in range(gateways):
            limits = {"max_requests": PER_GATEWAY, "reconnect_timeout_s": LATE_S, "rpc_timeout_s": 10.0}
            bench.links.append(GatewayLink(targets, Tls(), **limits, on_ready=noting(number)))
        bench.run(talker, worker, *bench.links)

        async def all_ready() -> bool:
            return len(bench.ready_at) == len(bench.links)

        await until(all_ready, LATE_S)
        yield bench
        for task in bench.running:
            task.cancel()


async def measure(waiting: int, prompt: int, kills: int, lease_s: float) -> dict[str, Any]:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # silence
    gateways = 1 + (SLOTS + waiting - 1) // PER_GATEWAY
    more = ("--max-live", str(2 * waiting + 100))
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as redis:
        async with benched(redis.url, "takeover", gateways, *more, lease_s=lease_s) as bench:
            listeners = await bench.submit(waiting, prompt)
            bench.run(*listeners)
            took = [await bench.kill_leader(waiting, listeners) for _ in range(kills)]
    first, read = (sorted(column) for column in zip(*took, strict=True))
    return {
        "waiting": waiting, "prompt_tokens": prompt, "kills": kills, "lease_s": lease_s,
        "first_token_s": _spread(first), "all_read_s": _spread(read),
        "tokens": sum(listener.tokens for listener in listeners), "recomputed": bench.talker.recomputed,
    }  # fmt: skip


def _spread(ordered: list[float]) -> dict[str, float]:
    at = {
        "p50": len(ordered) // 2,
        "p90": -(-9 * len(ordered) // 10) - 1,
        "p99": -(-99 * len(ordered) // 100) - 1,
        "max": len(ordered) - 1,
    }
    return {name: round(ordered[index], 3) for name, index in at.items()}


def main(
    waiting: Annotated[int, typer.Option(min=1)] = 10_000,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each request's prompt.")] = 200,
    kills: Annotated[int, typer.Option(min=1)] = 20,
    lease_s: float = 0.75,
) -> None:
    print(json.dumps(asyncio.run(measure(waiting, prompt, kills, lease_s)), indent=2))  # noqa: T201


if __name__ == "__main__":
    typer.run(main)
