"""One schedule, run: the services' own code in processes of a virtual loop, a supervisor that starts again what died,
and the hand that injects the faults."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import gateway.app
import scheduler_service.__main__ as scheduler
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import worker_link_pb2 as worker_pb
from protos.tls import Tls
from scheduler_service.store import Fenced, StoreUnavailable
from tests.scheduler.faults.client import Client
from tests.scheduler.faults.ends import Channel, current
from tests.scheduler.faults.loop import Process, Standstill, VirtualLoop
from tests.scheduler.faults.model import BLOCK_TOKENS, CountingEngine, VirtualRunner
from tests.scheduler.faults.network import Network
from tests.scheduler.faults.promise import Promise
from tests.scheduler.faults.schedule import LINK_FAULTS, Fault, Schedule
from tests.scheduler.faults.stand_ins import settings
from tests.scheduler.faults.storage import HISTORY_S, TIMEOUT_S, StoreServer
from worker_service.link import Link

ADDRESSES = {"s0": "127.0.0.1:50052", "s1": "127.0.0.1:50053", "g0": "127.0.0.1:50061", "g1": "127.0.0.1:50062"}
MAX_DRAFT = 4
PATIENCE_S = 120.0  # after the last fault, until all must have come to its end
STEPS = 400_000  # of all tasks: more is a loop without end
READ_S = 3.0  # until a new leader has read at the latest what the one before it wrote
NOTICED_S = 1.0  # until a leader has noticed at the latest that writes are gone


@dataclass(frozen=True)
class Result:
    schedule: Schedule
    broken: list[str]
    faults: Counter[str]
    outcomes: Counter[str]
    virtual_s: float
    steps: int


class World:
    def __init__(self, of: Schedule) -> None:
        self.of = of
        self.loop = VirtualLoop()
        self.rng = random.Random(f"{of.seed} noise")
        self.promise = Promise(self.loop.time)
        self.network = Network(self.loop, self.rng, self.promise.violated)
        self.storage = StoreServer(self.loop, self.rng, self.promise)
        self.processes: dict[str, Process] = {}
        self.slots: dict[str, Any] = {}  # who leads in each scheduler
        self.outboxes = 0
        self.gateways: dict[str, gateway.app.Gateway] = {}
        self.engines: dict[str, CountingEngine] = {}
        self.faults: Counter[str] = Counter()
        self.ended_at = 0.0
        self.calm_at = 0.0

    # ---- processes ----

    def start(self, name: str) -> None:
        process = self.processes[name] = Process(name, self.loop)
        process.world = self  # type: ignore[attr-defined]
        main = {"s": self._scheduler, "g": self._gateway, "w": self._worker}[name[0]]
        process.start(main(name)).add_done_callback(lambda task: self._exited(process, task), context=self.loop.neutral)

    def _exited(self, process: Process, task: "asyncio.Task[None]") -> None:
        if self.loop.over:
            return
        error = None if task.cancelled() else task.exception()
        expected = (StoreUnavailable, Fenced, OSError) if process.name[0] == "s" else ()
        if error is not None and not isinstance(error, expected):
            self.promise.violated(f"{process.name} failed: {error!r}")
        process.kill()
        self.network.ended(process, silently=False)
        self._restart(process.name, 0.1)

    def _restart(self, name: str, seconds: float) -> None:
        self.loop.at(self.loop.now + seconds, self.start, name)

    async def _scheduler(self, name: str) -> None:
        host, port = ADDRESSES[name].split(":")
        chosen = {"host": host, "port": int(port), "standby": self.of.pair, **dict(self.of.settings)}
        await scheduler.serve(settings()[0].model_copy(update=chosen))

    async def _gateway(self, name: str) -> None:
        port = int(ADDRESSES[name].split(":")[1])
        schedulers = ",".join(ADDRESSES[one] for one in self.of.schedulers)
        chosen = {"grpc_port": port, "scheduler": schedulers}
        async with gateway.app.running(settings()[1].model_copy(update=chosen)) as running:
            self.gateways[name] = running
            await current().stopping.wait()
            await running.drain(0.5)

    async def _worker(self, name: str) -> None:
        of = self.of
        engine = CountingEngine(of.blocks, of.host_blocks, MAX_DRAFT, self.rng, self.promise.violated)
        self.engines[name] = engine
        rng = self.rng
        runner = VirtualRunner(engine, of.slots, lambda: of.round_s * rng.uniform(0.5, 1.5))
        link = Link(
            [ADDRESSES[one] for one in of.schedulers],
            tls=Tls(),
            runner=runner,
            hello=worker_pb.Hello(
                worker_id=name,
                model=common_pb.ModelInfo(
                    name="counting", fingerprint="f", context_tokens=of.blocks * BLOCK_TOKENS, vocab_size=60_000
                ),
                slots=of.slots,
                blocks=of.blocks,
                block_tokens=BLOCK_TOKENS,
                host_blocks=of.host_blocks,
                max_draft=MAX_DRAFT,
            ),
            on_attached=_nothing,
        )
        running = asyncio.create_task(link.run())
        try:
            await asyncio.wait(
                [running, asyncio.ensure_future(current().stopping.wait())], return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            running.cancel()
        await asyncio.wait([running])
        if not running.cancelled():
            running.result()

    # ---- faults ----

    def inject(self, fault: Fault) -> None:
        now, seconds = self.loop.now, fault.seconds
        storage = self.storage
        match fault.kind:
            case "refused" | "unanswered" | "late":
                storage.trouble, storage.troubled_until = fault.kind, now + seconds
            case "away":
                storage.away_until = now + seconds
            case "hang":
                storage.hangs_until = now + seconds
            case "forget":
                seconds = min(seconds, HISTORY_S)
                self._lose(seconds)
                storage.forget(seconds)
                storage.away_until = now + 0.1
            case "wipe":
                self._lose(now)
                storage.forget(None)
                storage.away_until = now + 0.1
            case "evict":
                live = [id for id, stored in storage.store.requests.items() if stored.ending is None]
                if not live:
                    return
                self._lose(0.0)
                storage.store._requests = {**storage.store.requests}
                del storage.store._requests[self.rng.choice(live)]
            case kind if kind in LINK_FAULTS:
                self._link_fault(fault)
                return
            case _:
                process = self.processes[fault.target]
                if process.alive and not process.frozen:
                    process.after(fault.steps, lambda: self.strike(process, fault))
                return
        self.faults[fault.kind] += 1

    def _link_fault(self, fault: Fault) -> None:
        pair, until = frozenset((fault.target, fault.other)), self.loop.now + fault.seconds
        self.promise.worker_losses += any(end.startswith("w") for end in pair)
        self.faults[fault.kind] += 1
        match fault.kind:
            case "cut":
                self.network.cut(pair, 1.0, lost=self.rng.random() < 0.5)
            case "half-open":
                self.network.cut(pair, 0.5, lost=self.rng.random() < 0.5)
            case "hold":
                self.network.held[pair] = max(until, self.network.held.get(pair, 0.0))
            case "slow":
                self.network.slow[pair] = 0.3
                self.loop.at(until, self.network.slow.pop, pair, None)

    def strike(self, process: Process, fault: Fault) -> None:
        """What happens to a process, between two steps of it."""
        if not process.alive or process.frozen:
            return
        self.faults[f"{fault.kind} {process.name[0]}"] += 1
        self.promise.worker_losses += process.name.startswith("w")
        match fault.kind:
            case "kill" | "vanish":
                process.kill()
                self.loop.call_soon(self._gone, process, fault.kind == "vanish", context=self.loop.neutral)
                self._restart(process.name, 0.02 + fault.seconds)
            case "freeze":
                process.freeze()
                self.loop.at(self.loop.now + fault.seconds, self._thaw, process)
            case "stop":
                process.stopping.set()
            case "jump":
                process.skew_s += fault.seconds

    def _gone(self, process: Process, silently: bool) -> None:
        self.network.ended(process, silently=silently)

    def _thaw(self, process: Process) -> None:
        if process.alive:
            process.thaw()

    def _lose(self, seconds: float) -> None:
        """What was acknowledged in these last seconds is gone. Whoever leads has to have written all of it, and to lead
        until it has written it anew."""
        epoch, since = self.storage.led
        if self.loop.now - seconds - READ_S < since > self.storage.first_led:
            self.promise.excused = True
        self.storage.unwritten = epoch
        self.calm_at = max(self.calm_at, self.loop.now + NOTICED_S)

    # ---- a life ----

    async def live(self) -> None:
        of, loop = self.of, self.loop
        for name in (*of.schedulers, *(f"w{n}" for n in range(of.workers)), *(f"g{n}" for n in range(of.gateways))):
            self.start(name)
        while left := self.unsettled():
            await asyncio.sleep(0.05)
            if loop.now > PATIENCE_S:
                raise AssertionError(f"it never begins: {left}, {loop.failures}")
        begin = loop.now
        self.calm_at = begin + max((fault.at_s for fault in of.faults), default=0.0)
        for fault in of.faults:
            loop.at(begin + fault.at_s, self.inject, fault)
        crowd = Process("c", loop)
        crowd.world = self  # type: ignore[attr-defined]
        channels = [Channel(self.network, crowd, ADDRESSES[f"g{n}"]) for n in range(of.gateways)]
        self.clients = []
        for job in of.jobs:
            self.clients.append(Client(job, channels, self.promise, self.rng))
            if job.manner in ("twice", "conflict"):
                prompt = (job.prompt[0] + 100, *job.prompt[1:]) if job.manner == "conflict" else job.prompt
                again = replace(job, prompt=prompt, gateway=job.gateway + 1, at_s=job.at_s + 0.03 * job.after)
                self.clients.append(Client(again, channels, self.promise, self.rng))
        running = [crowd.start(client.run()) for client in self.clients]
        deadline = (
            self.calm_at
            + max((abs(fault.seconds) for fault in of.faults if fault.kind != "jump"), default=0.0)
            + PATIENCE_S
        )
        while not (all(task.done() for task in running) and not self.unsettled()):
            if loop.now > deadline or loop.steps > STEPS or self.promise.broken:
                break
            await asyncio.sleep(0.1)
        for task, client in zip(running, self.clients, strict=True):
            if task.done():
                task.result()
            elif not self.promise.broken:
                self.promise.violated(f"{client.job} waits for ever")
        if not self.promise.broken:
            for what in self.unsettled():
                self.promise.violated(what)
            self.promise.at_the_end(self.storage.store)
            self.ended_at = loop.now
            loop.now += self.storage.store._keep_s
            if left := self.storage.store.requests:
                self.promise.violated(f"{list(left)} never expire")

    def unsettled(self) -> list[str]:
        """What is not as it is when all is over: one leader, whom all serve, and who has nothing left."""
        storage = self.storage
        back_at = max(storage.away_until, storage.hangs_until, storage.troubled_until + TIMEOUT_S)
        if self.loop.now < max(self.calm_at, back_at + NOTICED_S if self.storage.unwritten else 0.0):
            return ["there is more to come"]
        if frozen := [name for name, process in self.processes.items() if process.frozen]:
            return [f"{frozen} are stopped"]
        leading = [
            (name, slot.leader) for name, slot in self.slots.items() if self.processes[name].alive and slot.leader
        ]
        if len(leading) != 1:
            return [f"{len(leading)} schedulers lead"]
        ((name, leader),) = leading
        left = [f"{name} still has {id}" for id in leader.core.fleet.entries | leader.ledger.live]
        unheard = leader.persister._lost or leader.recovery._rolled_back  # that the store holds everything, or what
        unheard = unheard or leader.ledger._early or leader.ledger._sent_again.qsize()
        if unheard or leader.recovery.unread or leader.persister.behind:
            left.append(f"{name} has not read {leader.recovery.unread} or not written {leader.persister.behind}")
        left += [f"{name} still relays {outbox.follows}" for outbox in leader.outboxes if outbox.follows]
        for worker, engine in self.engines.items():
            known = leader.core.fleet.workers.get(worker)
            if known is None or engine.requests or engine.free_blocks != engine.blocks:
                left.append(f"{worker} holds {list(engine.requests)}, and is {known}")
            elif len(known.ranking) or leader.sessions[worker].sent:
                left.append(f"{name} believes that {worker} has {leader.sessions[worker].sent}")
        for one in self.gateways.values():
            if one.link.feeds or not one.link.ready:
                left.append(f"a gateway has feeds of {list(one.link.feeds)}, and is ready: {one.link.ready}")
        return left


async def _nothing(_: object) -> None:
    return


def run(of: Schedule) -> Result:
    """Within `simulated()`."""
    random.seed(of.seed)  # of pauses before something is tried again
    world = World(of)
    try:
        world.loop.run_until_complete(world.live())
    except Standstill:
        world.promise.violated("nobody has anything left to do")
    finally:
        virtual_s, steps = world.ended_at or world.loop.now, world.loop.steps
        asyncio.set_event_loop(None)
        world.loop.wind_up()
    for failure in world.loop.failures:
        world.promise.violated(failure)
    world.faults.update(world.storage.faults)
    outcomes = Counter(client.outcome or "none" for client in world.clients)
    return Result(of, world.promise.broken, world.faults, outcomes, virtual_s, steps)
