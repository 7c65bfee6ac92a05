"""The HTTP port on which a service that has no other is watched: its metrics for Prometheus, whether it lives, and
whether it is ready. It answers nothing else."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protos.http_server import HttpServer
from protos.metrics import Distribution, Families, measure_loop_lag
from protos.serving import address
from protos.settings import ServiceSettings, is_loopback

STOP_GRACE_S = 0.5  # for a scrape that is under way


class _One:
    """A registry of one family, as far as `generate_latest` looks."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> list[Metric]:
        return [self._metric]


async def exposition(registry: CollectorRegistry) -> bytes:
    """What Prometheus reads. Others run after each family: all of them at once would hold the loop for milliseconds."""
    parts = []
    for metric in registry.collect():
        parts.append(generate_latest(_One(metric)))
        await asyncio.sleep(0)
    return b"".join(parts)


def make_app(families: Families, ready: Callable[[], bool]) -> Starlette:
    """/metrics, /live, and /health, which is 503 unless `ready()`."""

    async def metrics(request: Request) -> Response:
        return Response(await exposition(families.registry), media_type=CONTENT_TYPE_LATEST)

    async def health(request: Request) -> Response:
        return Response(status_code=200 if ready() else 503)

    async def live(request: Request) -> Response:
        return Response()

    routes = {"/metrics": metrics, "/health": health, "/live": live}
    app = Starlette(routes=[Route(path, handler) for path, handler in routes.items()])
    app.router.redirect_slashes = False
    return app


@asynccontextmanager
async def observed(
    settings: ServiceSettings, port: int | None, families: Families, lag: Distribution, ready: Callable[[], bool]
) -> AsyncIterator[None]:
    """Serve the metrics on `port` of the settings' host until the block ends, and measure the loop's lag meanwhile.
    Port None: neither. Elsewhere than on loopback a reader must show a certificate of the settings' authority. Raises
    OSError if the port is taken."""
    if port is None:
        yield
        return
    tls = settings.tls if settings.tls and not is_loopback(settings.host) else None
    contexts = tls.ssl_contexts() if tls is not None else None
    server = HttpServer(make_app(families, ready), settings.host, port, tls_context=contexts)
    await server.start()
    structlog.get_logger().info("serving_metrics", at=address(settings.host, server.port))
    measuring = asyncio.create_task(measure_loop_lag(lag), name="loop lag")
    try:
        yield
    finally:
        measuring.cancel()
        await server.stop(STOP_GRACE_S)
