"""`python -m worker_service`: settings, signals, and the parts put together. A failed model ends the process."""

import asyncio
import sys
from contextlib import suppress

import structlog

from protos.serving import PUBLIC_MESSAGE_BYTES, Server, configure_logs, first_of, stop_signals, trace
from protos.settings import is_loopback, read
from protos.v1 import worker_link_pb2
from worker_service.config import Settings
from worker_service.drafters import make_drafter
from worker_service.engine.engine import Engine
from worker_service.link import Link
from worker_service.models import LoadedModel, load
from worker_service.pull import ModelError
from worker_service.runner import Runner
from worker_service.wire import of_model

# The interface it takes part in; its health is the worker's readiness.
SERVICE = worker_link_pb2.DESCRIPTOR.services_by_name["WorkerLink"].full_name


async def serve(settings: Settings) -> None:
    """Until SIGTERM or SIGINT. Raises what the model raises, ModelError, or OSError if the port is taken."""
    log = configure_logs("worker", settings.log_level).bind(worker=settings.worker_id)
    # On loopback nobody but this machine asks; a worker's certificate is good for calling, not for being called.
    credentials = None if is_loopback(settings.host) else settings.tls.server_credentials()
    server = Server([SERVICE], PUBLIC_MESSAGE_BYTES, credentials, reflect=settings.reflection)
    async with stop_signals() as stopping:
        port = await server.start(settings.host, settings.health_port)
        log.info("listening", health=f"{settings.host}:{port}")
        try:
            await first_of(lambda: work(settings, server), stopping.wait)
        finally:
            await server.stop(0)
    log.info("stopped")


async def work(settings: Settings, server: Server) -> None:
    """Load, warm up, and serve the scheduler until cancelled."""
    log = configure_logs("worker", settings.log_level).bind(worker=settings.worker_id)
    model = await asyncio.to_thread(load, settings.model, settings.device, settings.dtype)
    context_tokens = min(model.context_tokens, settings.kv_tokens)
    engine = build_engine(settings, model, context_tokens)
    runner = Runner(engine, settings.slots, settings.threads)
    runner.start()
    ended = asyncio.wrap_future(runner.ended)
    try:
        cost = await asyncio.shield(asyncio.wrap_future(runner.warmed))
        log.info("warmed", model=model.name, dtype=str(model.dtype), device=str(model.device), cost=str(cost))
        link = Link(
            settings.scheduler,
            tls=settings.tls,
            worker_id=settings.worker_id,
            runner=runner,
            model=of_model(model, context_tokens, engine.vocab_size),
            cost=cost,
            slots=settings.slots,
            blocks=settings.blocks,
            block_tokens=settings.block_tokens,
            host_blocks=engine.host_blocks,
            max_draft=settings.max_draft,
            on_attached=server.set_ready,
        )
        await first_of(link.run, lambda: asyncio.shield(ended))
    finally:
        runner.stop()
        with suppress(Exception):
            await ended


def build_engine(settings: Settings, model: LoadedModel, context_tokens: int) -> Engine:
    return Engine(
        model.model,
        model.tokenizer,
        eos_ids=model.eos_ids,
        context_tokens=context_tokens,
        blocks=settings.blocks,
        block_tokens=settings.block_tokens,
        host_blocks=settings.host_blocks(model.device.type),
        max_draft=settings.max_draft,
        drafter=make_drafter(settings.drafter, model, blocks=settings.blocks, block_tokens=settings.block_tokens),
    )


def main() -> None:
    settings = read(Settings, "worker")
    try:
        asyncio.run(serve(settings))
    except (OSError, ModelError) as error:  # a taken port or a missing model is a sentence, not a traceback
        sys.exit(f"worker: {error}")
    except Exception as error:  # of the model: whoever supervises starts another one; the scheduler rebuilds requests
        structlog.get_logger().bind(service="worker").error("failed", trace=trace(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
