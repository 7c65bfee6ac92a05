"""A drafter in this process behind a real port, and who plays a worker for it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from laps_sd.ports import claim_ports
from protos.link.v1 import draft_link_pb2 as pb
from protos.link.v1 import draft_link_pb2_grpc as rpc
from protos.serving import channel
from tests.waiting import WAIT_S, until
from worker_service.drafting.__main__ import load
from worker_service.drafting.config import Settings
from worker_service.drafting.service import Loaded, serve


@asynccontextmanager
async def drafter(model: Path, **settings: Any) -> AsyncIterator[tuple[str, Loaded]]:
    """Its HOST:PORT, and what it computes with, once it listens; `Peer.attach` waits for the rest."""
    port, loaded = claim_ports(0)[0], asyncio.get_running_loop().create_future()
    chosen = {"model": str(model), "port": port, "kv_tokens": 2048, "threads": 1, "dtype": "float32", "device": "cpu"}
    read = Settings(**(chosen | settings), _cli_parse_args=False)  # type: ignore[call-arg]

    async def loading() -> Loaded:
        made = await asyncio.to_thread(load, read)
        loaded.set_result(made)
        return made

    running = asyncio.create_task(serve(read, loading))
    try:
        await asyncio.wait([running, loaded], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        yield f"127.0.0.1:{port}", await loaded
    finally:
        running.cancel()
        await asyncio.wait([running])


class Peer:
    """A worker as the drafter sees it. Keeps the newest chain of each handle; it asks for no branches."""

    def __init__(self, target: str, vocabulary: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._target, self._vocabulary = target, vocabulary
        self._channel = channel(target, credentials)
        self.welcome = pb.DraftWelcome()
        self.mains: dict[int, pb.Chain] = {}

    async def attempt(self, **hello: Any) -> None:
        """Raises AioRpcError."""
        self.call = rpc.DraftLinkStub(self._channel).Attach()
        said = {"protocol": 1, "worker_id": "w", "vocabulary": self._vocabulary} | hello
        await self.call.write(pb.ToDrafter(hello=pb.DraftHello(**said)))
        self.welcome = (await self.read()).welcome

    async def attach(self, **hello: Any) -> "Peer":
        """Asks again while the model is being loaded, and where the write met the end of the call: then gRPC says
        INTERNAL, whatever the reason (grpc #36066)."""

        async def attached() -> bool:
            try:
                await self.attempt(**hello)
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL):
                    return False
                raise
            return True

        await until(attached)
        return self

    async def read(self) -> pb.FromDrafter:
        """Raises AioRpcError if the drafter has ended the call."""
        async with asyncio.timeout(WAIT_S):
            message = await self.call.read()
        if message is grpc.aio.EOF:
            raise grpc.aio.AioRpcError(
                await self.call.code(),
                initial_metadata=grpc.aio.Metadata(),
                trailing_metadata=grpc.aio.Metadata(),
                details=await self.call.details(),
            )
        return message

    async def say(self, *rows: dict[str, Any]) -> None:
        truths = pb.Truths(rows=[pb.Truth(**row) for row in rows])
        await self.call.write(pb.ToDrafter(truths=truths))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Read messages until the condition holds."""
        while not condition():
            message = await self.read()
            self.mains |= {chain.handle: chain for chain in message.drafts.chains}

    async def chain(self, handle: int, at: int, tokens: int) -> list[int]:
        """The main chain of so many tokens after the first `at` ones."""

        def is_there() -> bool:
            chain = self.mains.get(handle)
            return chain is not None and chain.at == at and len(chain.tokens) == tokens

        await self.until(is_there)
        return list(self.mains[handle].tokens)

    async def ended(self) -> grpc.aio.AioRpcError:
        """Why the drafter ends the call."""
        try:
            await self.until(lambda: False)
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError("it goes on")

    async def close(self) -> None:
        await self._channel.close()
