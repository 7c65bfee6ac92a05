"""Puts one gateway together and runs it: ports, the link, draining. Its parts live in their own files."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.access import ADMIN, OWN, Access
from gateway.config import Settings
from gateway.keys import Keys
from gateway.link import Link
from gateway.metrics import Metrics
from gateway.rights import Right
from gateway.service import Inference
from protos.serving import Server, address, stranger_options
from protos.settings import is_loopback
from protos.v1 import inference_pb2, inference_pb2_grpc

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
OTHER_FIELDS_BYTES = 64 << 10  # of a request, beside its prompt
CALLS_PER_REQUEST = 2  # calls that one connection may have open, for each live request: so that a call too many is
# still answered, with RESOURCE_EXHAUSTED
STOP_GRACE_S = 1.0  # for telling the streams that outlive the drain, and for sending the last messages to the scheduler


@dataclass(frozen=True, slots=True)
class Gateway:
    """`grpc`, `http` and `admin` are the bound HOST:PORTs; `admin` is None if there is no separate admin port."""

    grpc: str
    http: str
    admin: str | None
    service: Inference
    link: Link
    server: Server

    async def drain(self, timeout_s: float) -> None:
        """Stop being ready, and give running streams `timeout_s` to end."""
        self.service.draining = True
        await self.server.set_ready(False)
        await self.service.drain(timeout_s, STOP_GRACE_S)


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Gateway]:
    """A gateway that serves until the block ends. Raises OSError if a port is taken."""
    metrics = Metrics()
    apart = settings.admin_port is not None or not is_loopback(settings.host)
    server = make_server(settings, OWN if apart else {**ADMIN, **OWN})
    admin = make_server(settings, ADMIN)

    async def on_ready(ready: bool) -> None:
        for port in (server, admin):
            await port.set_ready(ready and not service.draining)

    link = Link(
        settings.scheduler.split(","),
        settings.tls,
        max_requests=settings.max_requests,
        max_unread_tokens=settings.max_unread_tokens,
        reconnect_timeout_s=settings.reconnect_timeout_s,
        rpc_timeout_s=settings.rpc_timeout_s,
        on_ready=on_ready,
    )
    service = Inference(settings, link, metrics)
    metrics.live.set_function(lambda: len(link.feeds))
    for port in (server, admin):
        inference_pb2_grpc.add_InferenceServicer_to_server(service, port.grpc)
    http_port = metrics.serve(settings.admin_host, settings.http_port, settings.metrics_tls)
    try:
        grpc_port = await server.start(settings.host, settings.grpc_port)
        admin_at = None
        if settings.admin_port is not None:
            admin_port = await admin.start(settings.admin_host, settings.admin_port)
            admin_at = address(settings.admin_host, admin_port)
        async with asyncio.TaskGroup() as tasks:  # if the link fails the gateway ends, and is started again
            linking = tasks.create_task(link.run(), name="scheduler link")
            measuring = tasks.create_task(metrics.measure_loop_lag(), name="loop lag")
            try:
                http_at = address(settings.admin_host, http_port)
                yield Gateway(address(settings.host, grpc_port), http_at, admin_at, service, link, server)
            finally:
                await asyncio.gather(server.stop(STOP_GRACE_S), admin.stop(0))
                await link.scheduler.flush(STOP_GRACE_S)
                linking.cancel()
                measuring.cancel()
    finally:
        metrics.stop()


def make_server(settings: Settings, calls: Mapping[str, Right]) -> Server:
    """A server of the public interface. `calls`: the methods that it serves, and the right that each needs."""
    max_calls = 2 * CALLS_PER_REQUEST * settings.max_requests
    return Server(
        [SERVICE],
        settings.max_input_bytes + OTHER_FIELDS_BYTES,
        settings.server_credentials(),
        further_options=stranger_options(CALLS_PER_REQUEST * settings.max_requests),
        max_calls=max_calls,
        interceptors=[Access(Keys(settings.api_keys) if settings.api_keys else None, calls, max_calls)],
        reflect=settings.reflection,
    )


def write_ready_file(path: Path, gateway: Gateway) -> None:
    """The file appears whole: a program that polls for it never reads half of it."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(json.dumps({"grpc": gateway.grpc, "http": gateway.http, "admin": gateway.admin}))
    os.replace(draft, path)
