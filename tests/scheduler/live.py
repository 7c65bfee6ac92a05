"""A live scheduler in this process, and scripted peers that speak to it over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from protos import version
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as gateway_pb
from protos.link.v1 import gateway_link_pb2_grpc, worker_link_pb2_grpc
from protos.link.v1 import worker_link_pb2 as worker_pb
from protos.serving import LINK_MESSAGE_BYTES, Server, channel
from protos.tracing import Tracing
from protos.v1 import types_pb2 as types_pb
from scheduler_service.config import Settings
from scheduler_service.leader import Leader
from scheduler_service.links.gateways import GatewayLink
from scheduler_service.links.workers import WorkerLink
from scheduler_service.store import RedisStore, Store, StoreUnavailable, Verdict, Write
from tests.waiting import WAIT_S

Metadata = tuple[tuple[str, str], ...]
MODEL = common_pb.ModelInfo(name="scripted", fingerprint="f", context_tokens=256, vocab_size=100)


@asynccontextmanager
async def scheduler(
    store: Store, *, tracing: Tracing | None = None, **settings: Any
) -> AsyncIterator[tuple[Leader, str]]:
    """Leads at once; yields the leader and where it serves."""
    leader = Leader(Settings(_cli_parse_args=False, **settings), store, tracing=tracing)  # type: ignore[call-arg]
    await leader.lead()
    server = Server(("laps_sd.link.v1.WorkerLink", "laps_sd.link.v1.GatewayLink"), LINK_MESSAGE_BYTES)
    worker_link_pb2_grpc.add_WorkerLinkServicer_to_server(WorkerLink(lambda: leader), server.grpc)
    gateway_link_pb2_grpc.add_GatewayLinkServicer_to_server(GatewayLink(lambda: leader), server.grpc)
    port = await server.start("127.0.0.1", 0)
    running = asyncio.create_task(leader.run())
    try:
        yield leader, f"127.0.0.1:{port}"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(0)
        await leader.learning.close()
        if leader.event_log is not None:
            leader.event_log.close()


class Peer:
    """One end of a bidirectional stream; every read has a deadline."""

    def __init__(self, target: str, stub: Any, method: str, metadata: Metadata = version.METADATA) -> None:
        self.target = target
        self._channel = channel(target)
        self.call = getattr(stub(self._channel), method)(metadata=metadata)

    async def read(self) -> Any:
        async with asyncio.timeout(WAIT_S):
            message = await self._next()
        assert message is not grpc.aio.EOF, await self.call.details()
        return message

    async def ended(self) -> None:
        """Returns once the scheduler has ended the stream."""
        async with asyncio.timeout(WAIT_S):
            while await self._next() is not grpc.aio.EOF:
                pass

    async def _next(self) -> Any:
        return await self.call.read()

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close()


def hello(name: str = "w", **more: Any) -> worker_pb.Hello:
    """A worker's first message."""
    said = worker_pb.Hello(protocol=version.CURRENT, worker_id=name, session="s", model=MODEL, slots=1, max_draft=4)
    said.MergeFrom(worker_pb.Hello(block_tokens=16, blocks=64, cost=worker_pb.CostProfile(verify_s=0.01)))
    said.MergeFrom(worker_pb.Hello(**more))
    return said


class ScriptedWorker(Peer):
    def __init__(self, target: str, name: str = "w", slots: int = 1) -> None:
        super().__init__(target, worker_link_pb2_grpc.WorkerLinkStub, "Attach")
        self.name, self.slots, self.step_no = name, slots, 0
        self.session = f"{name}-session"
        self.welcome = worker_pb.Welcome()
        self.command = worker_pb.StepCommand()
        self.admitted: dict[str, worker_pb.Admit] = {}

    async def attach(self, *held: worker_pb.Held, **changes: Any) -> "ScriptedWorker":
        said = hello(self.name, session=self.session, slots=self.slots, held=held)
        said.MergeFrom(worker_pb.Hello(**changes))
        await self.call.write(worker_pb.FromWorker(hello=said))
        self.welcome = (await self.read()).welcome
        return self

    async def next_command(self) -> worker_pb.StepCommand:
        while not (message := await self.read()).HasField("command"):
            pass  # a heartbeat
        self.command = message.command
        self.admitted |= {admit.request_id: admit for admit in self.command.admit}
        return self.command

    async def until(self, *ids: str) -> worker_pb.StepCommand:
        """Commands up to the one whose list is exactly these."""
        while [run.request_id for run in self.command.schedule] != list(ids):
            await self.next_command()
        return self.command

    async def report(self, *rows: worker_pb.Row, **changes: Any) -> None:
        self.step_no += 1
        said = {"epoch": self.welcome.epoch, "session": self.session, "step": self.step_no, "rows": rows}
        said |= {"free_blocks": 50, "verify_s": 0.001} | changes
        await self.call.write(worker_pb.FromWorker(report=worker_pb.StepReport(**said)))

    def row(self, id: str, start: int, *tokens: int, finish: types_pb.FinishReason = 0, **more: Any) -> worker_pb.Row:  # type: ignore[assignment]
        placement = self.admitted[id].placement
        return worker_pb.Row(request_id=id, placement=placement, start=start, tokens=tokens, finish=finish, **more)


class ScriptedGateway(Peer):
    """A gateway that reads only when asked: its fields tell what it was sent up to the message that it read last.
    `heard_all` and `ended` read on."""

    def __init__(self, target: str, metadata: Metadata = version.METADATA) -> None:
        super().__init__(target, gateway_link_pb2_grpc.GatewayLinkStub, "Link", metadata)
        self.unary = gateway_link_pb2_grpc.GatewayLinkStub(self._channel)
        self.accepted: set[str] = set()
        self.refused: dict[str, gateway_pb.Refusal] = {}
        self.tokens: dict[str, list[int]] = {}
        self.endings: dict[str, gateway_pb.Ending] = {}
        self.serving = gateway_pb.Serving()

    async def submit(self, id: str, *prompt: int, max_tokens: int = 50, **more: Any) -> None:
        limits = common_pb.Limits(max_tokens=max_tokens)
        submit = gateway_pb.Submit(request_id=id, prompt=prompt or (1, 2, 3), limits=limits, **more)
        await self.call.write(gateway_pb.FromGateway(submit=submit))

    async def follow(self, id: str, offset: int = 0) -> None:
        await self.call.write(gateway_pb.FromGateway(follow=gateway_pb.Follow(request_id=id, offset=offset)))

    async def cancel(self, id: str) -> None:
        await self.call.write(gateway_pb.FromGateway(cancel=gateway_pb.Cancel(request_id=id)))

    async def until(self, condition: Any) -> None:
        """Read messages until the condition holds: it is looked at after each, so that it may hold for a moment."""
        while not condition():
            await self.read()

    async def heard_all(self) -> None:
        """Returns once it has all that the scheduler has had for it: messages keep their order, and this submission is
        refused without a look into the store."""
        await self.submit("malformed", max_tokens=0)
        await self.until(lambda: "malformed" in self.refused)
        del self.refused["malformed"]

    async def _next(self) -> Any:
        message = await super()._next()
        if message is not grpc.aio.EOF:
            self._take(message)
        return message

    def _take(self, message: gateway_pb.ToGateway) -> None:
        self.accepted |= set(message.accepted)
        self.refused |= {refusal.request_id: refusal for refusal in message.refusals}
        if message.HasField("serving"):
            self.serving = message.serving
        for delta in message.deltas:
            have = self.tokens.setdefault(delta.request_id, [])
            assert delta.start == len(have), "a gap or a repetition"
            have += delta.tokens
            if delta.HasField("ending"):
                self.endings[delta.request_id] = delta.ending


class Switch(RedisStore):
    """A store whose connection can be cut."""

    cut = False

    async def commit(self, epoch: int, number: int, writes: Sequence[Write]) -> list[Verdict]:
        if self.cut:
            raise StoreUnavailable("cut")
        return await super().commit(epoch, number, writes)


Live = tuple[Leader, ScriptedWorker, ScriptedGateway]


async def drain(worker: ScriptedWorker) -> None:
    while True:
        await worker.next_command()
