"""Puts one gateway together and runs it: ports, the link, draining. Its parts live in their own files."""

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp

from gateway.access import ADMIN, ALL, OWN, GrpcAccess
from gateway.cell_file import Cell, CellList, read_cells
from gateway.cells import ONLY, Cells
from gateway.config import Settings
from gateway.front import Front
from gateway.http.access import HttpAccess
from gateway.http.app import common_routes, make_app
from gateway.http.errors import UNREADABLE
from gateway.keys import Keys
from gateway.link import Link
from gateway.metrics import Metrics
from gateway.oip.service import OpenInference
from gateway.openai.routes import routes as openai_routes
from gateway.page.routes import routes as page_routes
from gateway.rights import Right
from gateway.service import Inference
from protos import tracing
from protos.http_server import STALLED_S, HttpServer
from protos.metrics import measure_loop_lag
from protos.oip import inference_pb2 as oip_pb2
from protos.oip import inference_pb2_grpc as oip_pb2_grpc
from protos.serving import Server, address, stranger_options
from protos.v1 import inference_pb2, inference_pb2_grpc
from protos.watched import Watched

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
OIP_SERVICE = oip_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
OTHER_FIELDS_BYTES = 64 << 10  # of a request, beside its prompt
CALLS_PER_REQUEST = 2  # calls that one connection may have open, for each live request: so that a call too many is
# still answered, with RESOURCE_EXHAUSTED
STOP_GRACE_S = 1.0  # for telling the streams that outlive the drain, and for sending the last messages to the scheduler


@dataclass(frozen=True, slots=True)
class Gateway:
    """`grpc`, `http`, `admin` and `metrics` are the bound HOST:PORTs; the last two are None if there are no such ports
    of their own."""

    grpc: str
    http: str
    admin: str | None
    metrics: str | None
    front: Front
    cells: Cells
    server: Server

    @property
    def link(self) -> Link:
        """Of a service with one cell."""
        (link,) = self.cells.links.values()
        return link

    async def drain(self, timeout_s: float) -> None:
        """Stop being ready, and give running streams `timeout_s` to end."""
        self.front.draining = True
        await self.server.set_ready(False)
        await self.front.drain(timeout_s, STOP_GRACE_S)


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Gateway]:
    """A gateway that serves until the block ends. Raises OSError if a port is taken."""
    apart = settings.admin_port is not None or settings.for_strangers
    keys = Keys(settings.api_keys) if settings.api_keys else None
    server = make_server(settings, keys, OWN if apart else ALL, [SERVICE, OIP_SERVICE])
    admin = make_server(settings, keys, ADMIN, [SERVICE])

    async def on_ready() -> None:
        for port in (server, admin):
            await port.set_ready(front.ready)

    def link_to(schedulers: Sequence[str]) -> Link:
        return Link(
            schedulers,
            settings.tls,
            max_requests=settings.max_requests,
            max_unread_tokens=settings.max_unread_tokens,
            reconnect_timeout_s=settings.reconnect_timeout_s,
            rpc_timeout_s=settings.rpc_timeout_s,
            wants_load=settings.cells is not None,
            on_ready=on_ready,
        )

    cells = Cells(link_to, listed_cells(settings), settle_s=settings.cells_settle_s, on_ready=on_ready)
    metrics = Metrics(settings.metrics_prefix, lambda: ",".join(cells.models()), lambda: cells.live)
    traces = tracing.make("gateway", settings.otlp_endpoint, settings.trace_ratio)
    front = Front(settings, cells, metrics, traces)
    for port in (server, admin):
        inference_pb2_grpc.add_InferenceServicer_to_server(Inference(front), port.grpc)
    open_inference = OpenInference(front, settings.stalled_s)
    oip_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(open_inference, server.grpc)
    ports = Ports()
    try:
        http_at = await ports.serve(
            http_app(settings, keys, front, metrics),
            settings.host,
            settings.http_port,
            settings.ssl_contexts(),
            settings.stalled_s,
        )
        metrics_at = admin_at = None
        if settings.metrics_port is not None:
            tls = settings.metrics_ssl_contexts()
            metrics_at = await ports.serve(metrics_app(front, metrics), settings.admin_host, settings.metrics_port, tls)
        grpc_at = address(settings.host, await server.start(settings.host, settings.grpc_port))
        await server.start_health(settings.health_host, settings.health_port)
        if settings.admin_port is not None:
            admin_at = address(settings.admin_host, await admin.start(settings.admin_host, settings.admin_port))
        async with asyncio.TaskGroup() as tasks:  # if the link fails the gateway ends, and is started again
            linking = tasks.create_task(cells.run(), name="scheduler links")
            measuring = tasks.create_task(measure_loop_lag(metrics.lag), name="loop lag")
            try:
                yield Gateway(grpc_at, http_at, admin_at, metrics_at, front, cells, server)
            finally:
                await asyncio.gather(server.stop(STOP_GRACE_S), admin.stop(0), ports.stop())
                await cells.flush(STOP_GRACE_S)
                await front.close()
                linking.cancel()
                measuring.cancel()
    finally:
        await ports.stop()
        if traces is not None:
            traces.close()


def listed_cells(settings: Settings) -> Callable[[], CellList]:
    """The newest list of the file; without a file the one cell that the settings name."""
    if settings.cells is None:
        only = CellList(1, (Cell(ONLY, tuple(settings.scheduler.split(","))),))
        return lambda: only
    return Watched([settings.cells], partial(read_cells, settings.cells)).get


class Ports:
    """The HTTP ports."""

    def __init__(self) -> None:
        self._servers: list[HttpServer] = []

    async def serve(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        tls_context: Callable[[], ssl.SSLContext] | None,
        stalled_s: float = STALLED_S,
    ) -> str:
        """Serve it there. Returns HOST:PORT. Raises OSError if the port is taken."""
        server = HttpServer(app, host, port, tls_context=tls_context, unreadable=UNREADABLE, stalled_s=stalled_s)
        self._servers.append(server)
        await server.start()
        return address(host, server.port)

    async def stop(self) -> None:
        servers, self._servers = self._servers, []
        await asyncio.gather(*(server.stop(STOP_GRACE_S) for server in servers))


def http_app(settings: Settings, keys: Keys | None, front: Front, metrics: Metrics) -> ASGIApp:
    """The app of the public HTTP port."""
    metrics_right = Right.ADMIN if settings.for_strangers else None
    return make_app(
        [
            *openai_routes(front, metrics, settings.model_aliases),  # the first ones are found first
            *common_routes(front, metrics.registry, metrics_right=metrics_right),
            *page_routes(front, keys),
        ],
        HttpAccess(keys, _max_calls(settings), strangers=settings.for_strangers, origins=settings.cors_origins),
        most_body_bytes=settings.max_input_bytes + OTHER_FIELDS_BYTES,
        cors_origins=settings.cors_origins,
        answers=metrics.http_answers,
    )


def metrics_app(front: Front, metrics: Metrics) -> ASGIApp:
    """The app of the port for metrics. Everybody who reaches that port may read them."""
    access = HttpAccess(None, CALLS_PER_REQUEST, strangers=False)
    return make_app(common_routes(front, metrics.registry, metrics_right=None), access, most_body_bytes=0)


def _max_calls(settings: Settings) -> int:
    return 2 * CALLS_PER_REQUEST * settings.max_requests


def make_server(
    settings: Settings, keys: Keys | None, calls: Mapping[str, Set[Right]], services: Sequence[str]
) -> Server:
    """A server of `services`. `calls`: the methods that it serves, and the rights of which each needs one."""
    max_calls = _max_calls(settings)
    return Server(
        services,
        settings.max_input_bytes + OTHER_FIELDS_BYTES,
        settings.server_credentials(),
        further_options=stranger_options(CALLS_PER_REQUEST * settings.max_requests),
        max_calls=max_calls,
        interceptors=[GrpcAccess(keys, calls, max_calls)],
        reflect=settings.reflection,
    )


def write_ready_file(path: Path, gateway: Gateway) -> None:
    """The file appears whole: a program that polls for it never reads half of it."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(json.dumps({name: getattr(gateway, name) for name in ("grpc", "http", "admin", "metrics")}))
    os.replace(draft, path)
