"""A worker as a service, whichever engine it has: health, metrics, the runner's thread, the link, an orderly end. How
a model becomes an engine is not known here, and no torch is imported."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from protos import tracing
from protos.link.v1 import worker_link_pb2
from protos.logs import configure_logs
from protos.observed import observed
from protos.serving import (
    MAX_PROBES,
    PUBLIC_MESSAGE_BYTES,
    Server,
    address,
    first_of,
    stop_signals,
    stranger_options,
)
from worker_service.announcing import RefusedError, announce
from worker_service.config import CommonSettings
from worker_service.engine.port import EnginePort
from worker_service.identity import Described, fingerprint, model_name, read_ahead
from worker_service.link import Link
from worker_service.loading import beside
from worker_service.metrics import Metrics
from worker_service.runner import Runner
from worker_service.stays import Stays
from worker_service.watchdog import running
from worker_service.wire import of_model

# The service whose health, by grpc.health.v1, is the worker's readiness.
SERVICE = worker_link_pb2.DESCRIPTOR.services_by_name["WorkerLink"].full_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An engine with its model. `runner` is to be started. `context_tokens`: what model and KV memory allow; asked once
    the runner is warmed. `max_draft`: tokens drafted for one request in a step. `about`: what the log tells of it."""

    engine: EnginePort
    runner: Runner
    model: Described
    context_tokens: Callable[[], int]
    max_draft: int
    about: Mapping[str, str]


async def serve(
    settings: CommonSettings, load: Callable[[], Awaitable[Loaded]], find: Callable[[str], Path] = Path
) -> bool:
    """Run the worker until SIGTERM or SIGINT, or until somebody has the scheduler let it go, which returns True. Raises
    what `load` and the engine raise, OSError if the port is taken, RefusedError. `find`: the folder of the model that
    the settings name."""
    log = configure_logs("worker", settings.log_level, worker=settings.worker_id)
    # It tells health and nothing else, in plaintext.
    bounds = stranger_options(MAX_PROBES)
    server = Server([SERVICE], PUBLIC_MESSAGE_BYTES, further_options=bounds, max_calls=MAX_PROBES, reflect=False)
    async with stop_signals() as stopping:
        port = await server.start(settings.health_host, settings.health_port)
        log.info("listening", health=address(settings.health_host, port))
        attached: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        metrics = Metrics(settings.metrics_prefix)
        traces = tracing.make("worker", settings.otlp_endpoint, settings.trace_ratio)
        stays = Stays(traces, settings.worker_id)
        told_to_drain = asyncio.Event()

        def drain() -> None:
            told_to_drain.set()
            stopping.set()

        async def stop() -> None:
            await stopping.wait()
            if attached.done():
                log.info("draining")
                await attached.result().drain(settings.drain_s)

        try:
            async with observed(settings, settings.metrics_port, metrics, metrics.lag, lambda: server.ready):
                await first_of(
                    lambda: _work(settings, load, server, attached, metrics, stays, drain),
                    lambda: _announce(settings, find, attached),
                    stop,
                )
        finally:
            await server.stop(0)
            if traces is not None:
                traces.close()
    log.info("stopped")
    return told_to_drain.is_set()


async def _announce(settings: CommonSettings, find: Callable[[str], Path], attached: "asyncio.Future[Link]") -> None:
    """Say that this worker is coming, until it has a link. Never returns. Raises RefusedError if it is to leave."""
    try:
        folder = await beside(find, settings.model)
        read_ahead(folder)
        digest = fingerprint(folder, settings.weights_kind)
        about = {"worker": settings.worker_id, "model": model_name(folder), "fingerprint": digest}
        schedulers = settings.scheduler.split(",")
        await first_of(lambda: announce(schedulers, settings.tls, **about), lambda: asyncio.shield(attached))
    except RefusedError as error:
        structlog.get_logger().bind(service="worker", worker=settings.worker_id).error("refused", reason=str(error))
        if settings.leave_if_refused:
            raise
    except Exception:
        pass  # who loads the model says what is wrong with it
    await asyncio.Event().wait()


async def _work(
    settings: CommonSettings,
    load: Callable[[], Awaitable[Loaded]],
    server: Server,
    attached: "asyncio.Future[Link]",
    metrics: Metrics,
    stays: Stays,
    on_drain: Callable[[], None],
) -> None:
    """Load the model, warm up, and serve the scheduler until cancelled. `attached` gets the link once there is one."""
    log = configure_logs("worker", settings.log_level, worker=settings.worker_id)
    log.info("loading", model=settings.model)
    loaded = await load()
    engine, runner = loaded.engine, loaded.runner
    metrics.serve(loaded.model.name, runner.tally, lambda: engine.blocks)
    log.info("warming_up")
    async with running(runner, settings.step_timeout_s, settings.warm_up_timeout_s) as ended:
        cost = await asyncio.shield(asyncio.wrap_future(runner.warmed))
        log.info("warmed", model=loaded.model.name, **loaded.about, cost=str(cost))
        link = Link(
            settings.scheduler.split(","),
            tls=settings.tls,
            runner=runner,
            hello=worker_link_pb2.Hello(
                worker_id=settings.worker_id,
                model=of_model(loaded.model, loaded.context_tokens(), engine.vocab_size),
                slots=runner.slots,
                blocks=engine.blocks,
                block_tokens=engine.block_tokens,
                host_blocks=engine.host_blocks,
                max_draft=loaded.max_draft,
            ),
            on_attached=server.set_ready,
            stays=stays,
            on_drain=on_drain,
            leave_if_refused=settings.leave_if_refused,
        )
        attached.set_result(link)
        await first_of(link.run, lambda: asyncio.shield(ended))
