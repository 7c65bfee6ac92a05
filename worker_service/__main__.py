"""`python -m worker_service`: settings, signals, and the worker's parts put together."""

import asyncio
import signal
import sys
from contextlib import suppress
from pathlib import Path

import structlog
import torch

from protos import tracing
from protos.link.v1 import worker_link_pb2
from protos.observed import observed
from protos.serving import PUBLIC_MESSAGE_BYTES, Server, address, configure_logs, first_of, stop_signals, trace
from protos.settings import BAD_SETTINGS, is_loopback, read
from worker_service.capacity import TooLittleMemoryError, check_kv_tokens, check_memory, summary
from worker_service.config import Settings
from worker_service.drafters import make_drafter
from worker_service.engine.engine import Engine
from worker_service.engine.parallel import Group, ParallelError, Ranks, SharedTarget
from worker_service.engine.self_check import check, own_logits
from worker_service.link import Link
from worker_service.metrics import Metrics
from worker_service.model_files import ModelError, check_directory
from worker_service.models import LoadedModel, choose_device, choose_dtype, load
from worker_service.pace import Pace, PacedRunner
from worker_service.runner import Runner
from worker_service.stays import Stays
from worker_service.watchdog import Watchdog
from worker_service.wire import of_model

# The service whose health, by grpc.health.v1, is the worker's readiness.
SERVICE = worker_link_pb2.DESCRIPTOR.services_by_name["WorkerLink"].full_name


async def serve(settings: Settings, group: Group | None) -> None:
    """Run the worker until SIGTERM or SIGINT. Raises what the model raises, ModelError, or OSError if the port is
    taken.

    `group`: the processes that share the model with this one, which leads them.
    """
    log = configure_logs("worker", settings.log_level).bind(worker=settings.worker_id)
    # On loopback only this machine can ask. A worker's certificate is for calling others, so it is not needed there.
    credentials = None if is_loopback(settings.host) else settings.tls.server_credentials()
    server = Server([SERVICE], PUBLIC_MESSAGE_BYTES, credentials, reflect=settings.reflection)
    async with stop_signals() as stopping:
        port = await server.start(settings.host, settings.health_port)
        log.info("listening", health=address(settings.host, port))
        attached: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        metrics = Metrics(settings.blocks, settings.metrics_prefix)
        traces = tracing.make("worker", settings.otlp_endpoint, settings.trace_ratio)
        stays = Stays(traces, settings.worker_id)

        async def stop() -> None:
            await stopping.wait()
            if attached.done():
                log.info("draining")
                await attached.result().drain(settings.drain_s)

        try:
            async with observed(settings, settings.metrics_port, metrics, metrics.lag, lambda: server.ready):
                await first_of(lambda: work(settings, group, server, attached, metrics, stays), stop)
        finally:
            await server.stop(0)
            if traces is not None:
                traces.close()
    log.info("stopped")


async def work(
    settings: Settings,
    group: Group | None,
    server: Server,
    attached: "asyncio.Future[Link]",
    metrics: Metrics,
    stays: Stays,
) -> None:
    """Load the model, warm up, and serve the scheduler until cancelled. `attached` gets the link once there is one."""
    log = configure_logs("worker", settings.log_level).bind(worker=settings.worker_id)
    log.info("loading", model=settings.model)
    model = await asyncio.to_thread(load_share, settings, group)
    check_kv_tokens(settings.kv_tokens, model.context_tokens)
    context_tokens = min(model.context_tokens, settings.kv_tokens)
    engine = await asyncio.to_thread(build_engine, settings, model, context_tokens, group)
    if settings.pace:
        runner: Runner = PacedRunner(engine, settings.slots, settings.threads, Pace(settings.pace))
    else:
        runner = Runner(engine, settings.slots, settings.threads)
    metrics.serve(model.name, runner.tally)
    log.info("warming_up")
    runner.start()
    ended = asyncio.wrap_future(runner.ended)
    watchdog = asyncio.create_task(Watchdog(runner, settings.step_timeout_s, settings.warm_up_timeout_s).run())
    try:
        cost = await asyncio.shield(asyncio.wrap_future(runner.warmed))
        log.info("warmed", model=model.name, dtype=str(model.dtype), device=str(model.device), cost=str(cost))
        link = Link(
            settings.scheduler.split(","),
            tls=settings.tls,
            runner=runner,
            hello=worker_link_pb2.Hello(
                worker_id=settings.worker_id,
                model=of_model(model, context_tokens, engine.vocab_size),
                slots=settings.slots,
                blocks=settings.blocks,
                block_tokens=settings.block_tokens,
                host_blocks=engine.host_blocks,
                max_draft=settings.max_draft,
            ),
            on_attached=server.set_ready,
            stays=stays,
        )
        attached.set_result(link)
        await first_of(link.run, lambda: asyncio.shield(ended))
    finally:
        runner.stop()
        with suppress(Exception):
            await ended
        watchdog.cancel()  # not before: the last step may hang, too


def load_share(settings: Settings, group: Group | None) -> LoadedModel:
    """The model, or this process's share of it once all others have loaded theirs. Raises ModelError, ParallelError."""
    ranks, folder = group.ranks if group else Ranks(), Path(settings.model)
    check_directory(folder)
    device = choose_device(settings.device, ranks)
    check_memory(
        folder,
        device,
        choose_dtype(settings.dtype, device),
        kv_tokens=settings.blocks * settings.block_tokens,
        host_kv_tokens=settings.host_blocks(device.type) * settings.block_tokens,
        shares=ranks.size,
    )
    model = load(settings.model, settings.device, settings.dtype, ranks)
    if group:
        group.loaded()
    return model


def share(settings: Settings, ranks: Ranks) -> None:
    """Lead, or compute a share of each pass until the leader ends. Raises ParallelError, and what `serve` raises."""
    if not ranks.leads:
        # torchrun signals all processes. The leader decides when to end, and its last step needs every share.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    group = Group(ranks, choose_device(settings.device, ranks))
    if ranks.leads:
        asyncio.run(serve(settings, group))
    else:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        SharedTarget(load_share(settings, group).model, group).follow()
    group.leave()


def build_engine(settings: Settings, model: LoadedModel, context_tokens: int, group: Group | None = None) -> Engine:
    """An engine that has passed the self-check. Raises ModelError if it cannot compute what the model does."""
    try:
        # A shared model cannot be checked: each process has a part, and there is no whole to compare with.
        expected = None if group else own_logits(model.model, context_tokens)
        engine = Engine(
            model.model,
            model.tokenizer,
            eos_ids=model.eos_ids,
            context_tokens=context_tokens,
            blocks=settings.blocks,
            block_tokens=settings.block_tokens,
            host_blocks=settings.host_blocks(model.device.type),
            max_draft=settings.max_draft,
            drafter=make_drafter(settings.drafter, model, blocks=settings.blocks, block_tokens=settings.block_tokens),
            group=group,
        )
        if expected is not None:
            check(engine, expected)
    except (ModelError, ParallelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model of its own kind does in a pass, before it answers anybody
        name = type(model.model).__name__
        raise ModelError(f"{settings.model}: the engine cannot serve this {name}: {summary(error)}") from error
    return engine


def main() -> None:
    settings = read(Settings, "worker")
    ranks = Ranks.from_environment()
    name = "worker" if ranks.size == 1 else f"worker, process {ranks.rank + 1} of {ranks.size}"
    try:
        if ranks.size == 1:
            asyncio.run(serve(settings, None))
        else:
            share(settings, ranks)
    except (OSError, ModelError, ParallelError) as error:  # a sentence, not a traceback
        sys.stderr.write(f"{name}: {error}\n")
        hopeless = isinstance(error, ModelError) and not isinstance(error, TooLittleMemoryError)
        sys.exit(BAD_SETTINGS if hopeless else 1)
    except Exception as error:  # of the model: the supervisor starts another worker, and the requests go on elsewhere
        structlog.get_logger().bind(service="worker").error("failed", trace=trace(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
