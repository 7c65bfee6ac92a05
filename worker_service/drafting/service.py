"""A drafter as a service: health, metrics, the model's thread, the port that workers dial, an orderly end. How a model
is loaded is not known here."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from protos.link.v1 import draft_link_pb2, draft_link_pb2_grpc
from protos.observed import observed
from protos.serving import (
    LINK_MESSAGE_BYTES,
    MAX_PROBES,
    PUBLIC_MESSAGE_BYTES,
    Server,
    address,
    first_of,
    stop_signals,
    stranger_options,
)
from protos.tls import PeerNames
from worker_service.drafting.computing import Computing, Told
from worker_service.drafting.config import Settings
from worker_service.drafting.link import DraftLink, Served
from worker_service.drafting.metrics import Metrics
from worker_service.drafting.session import Bounds
from worker_service.watchdog import running

if TYPE_CHECKING:  # it brings torch along, and the port is up before
    from worker_service.drafting.passes import Passes

# Its health, by grpc.health.v1, is the drafter's readiness.
SERVICE = draft_link_pb2.DESCRIPTOR.services_by_name["DraftLink"].full_name
STOP_GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready for passes. `vocabulary`: the digest of its tokens' texts."""

    passes: "Passes"
    name: str
    vocabulary: str


async def serve(settings: Settings, load: Callable[[], Awaitable[Loaded]]) -> None:
    """Until SIGTERM or SIGINT. Raises what `load` and the model raise, and OSError if a port is taken."""
    log = structlog.get_logger()
    metrics = Metrics(settings.metrics_prefix)
    link = DraftLink(settings.sessions, metrics)
    server = make_server(settings)
    draft_link_pb2_grpc.add_DraftLinkServicer_to_server(link, server.grpc)
    async with stop_signals() as stopping:
        try:
            port = await server.start(settings.host, settings.port)
            await server.start_health(settings.health_host, settings.health_port)
            log.info("listening", at=address(settings.host, port))
            async with observed(settings, settings.metrics_port, metrics, metrics.lag, lambda: server.ready):
                await first_of(lambda: _work(settings, load, server, link, metrics), stopping.wait)
        finally:
            link.leaving.set()
            await server.stop(STOP_GRACE_S)
    log.info("stopped")


def make_server(settings: Settings) -> Server:
    """Under TLS it takes certificates of the authority alone, and of those the names of workers."""
    return Server(
        [SERVICE],
        PUBLIC_MESSAGE_BYTES,
        settings.tls.server_credentials(),
        # What it sends is bounded by what a session may ask for.
        further_options=stranger_options(settings.sessions + MAX_PROBES)
        | {"grpc.max_send_message_length": LINK_MESSAGE_BYTES},
        max_calls=settings.sessions + MAX_PROBES,
        interceptors=[PeerNames({SERVICE: settings.worker_names})] if settings.tls else [],
        reflect=settings.reflection,
    )


async def _work(
    settings: Settings, load: Callable[[], Awaitable[Loaded]], server: Server, link: DraftLink, metrics: Metrics
) -> None:
    """Load the model, measure it, and serve until cancelled, or until the model's thread ends."""
    log, loop = structlog.get_logger(), asyncio.get_running_loop()
    log.info("loading", model=settings.model)
    loaded = await load()

    def tell(told: Told) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(link.tell, told)

    passes = loaded.passes
    computing = Computing(passes, settings.threads, tell)
    async with running(computing, settings.step_timeout_s, settings.warm_up_timeout_s) as ended:
        try:
            step_s, chain_s = await asyncio.shield(asyncio.wrap_future(computing.started))
            bounds = Bounds(passes.context_tokens, passes.vocab_size, settings.handles, settings.session_tokens)
            link.serve(Served(computing, bounds, loaded.name, loaded.vocabulary, step_s, chain_s))
            metrics.serve(loaded.name, computing.tally, settings.blocks, lambda: len(link))
            await server.set_ready(True)
            log.info("ready", model=loaded.name, step_ms=round(1e3 * step_s, 2), chain_ms=round(1e3 * chain_s, 2))
            await asyncio.shield(ended)
        finally:
            link.leaving.set()
