"""One running gateway: binds, links, drains. Each part lives in its own file."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.access import Access
from gateway.config import Settings
from gateway.keys import Keys
from gateway.link import Link
from gateway.metrics import Metrics
from gateway.service import Inference
from protos.serving import PUBLIC_MESSAGE_BYTES, Server
from protos.v1 import inference_pb2, inference_pb2_grpc

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
STOP_GRACE_S = 1.0  # for streams that outlived the drain to be told, and for the last words to the scheduler


@dataclass(frozen=True, slots=True)
class Gateway:
    """`grpc` and `http`: the bound HOST:PORTs."""

    grpc: str
    http: str
    service: Inference
    link: Link
    server: Server

    async def drain(self, timeout_s: float) -> None:
        """Not ready any more; running streams may end within `timeout_s`."""
        self.service.draining = True
        await self.server.set_ready(False)
        await self.service.drain(timeout_s, STOP_GRACE_S)


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Gateway]:
    """A gateway that serves until the block ends. Raises OSError if a port is taken."""
    metrics = Metrics()
    server = Server(
        [SERVICE],
        PUBLIC_MESSAGE_BYTES,
        settings.server_credentials(),
        interceptors=[Access(Keys(settings.api_keys))] if settings.api_keys else [],
        reflect=settings.reflection,
    )

    async def on_ready(ready: bool) -> None:
        await server.set_ready(ready and not service.draining)

    link = Link(
        settings.scheduler,
        settings.tls,
        max_requests=settings.max_requests,
        reconnect_timeout_s=settings.reconnect_timeout_s,
        rpc_timeout_s=settings.rpc_timeout_s,
        on_ready=on_ready,
    )
    service = Inference(settings, link, metrics)
    metrics.live.set_function(lambda: len(link.feeds))
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server.grpc)
    http_port = metrics.serve(settings.host, settings.http_port)
    try:
        grpc_port = await server.start(settings.host, settings.grpc_port)
        async with asyncio.TaskGroup() as tasks:  # a link that fails ends the gateway: its starter starts it again
            linking = tasks.create_task(link.run(), name="scheduler link")
            try:
                yield Gateway(f"{settings.host}:{grpc_port}", f"{settings.host}:{http_port}", service, link, server)
            finally:
                await server.stop(STOP_GRACE_S)
                await link.flush(STOP_GRACE_S)
                linking.cancel()
    finally:
        metrics.stop()


def write_ready_file(path: Path, gateway: Gateway) -> None:
    """Whole or not at all: whoever polls for the file never reads half of it."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(json.dumps({"grpc": gateway.grpc, "http": gateway.http}))
    os.replace(draft, path)
