"""A model, and our own engine for it, from a worker's settings. It brings torch along: `__main__` imports it while the
service says already that this worker is coming."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import torch

from protos.logs import configure_logs
from protos.serving import first_of
from worker_service.capacity import NO_DRAFTER, check_kv_tokens, check_memory, drafter_memory, read_config, summary
from worker_service.config import Settings
from worker_service.drafters import Caller, make_drafter
from worker_service.engine.engine import Engine
from worker_service.engine.parallel import ParallelError, ProcessGroup, Ranks, SharedTarget
from worker_service.engine.ragged import problem
from worker_service.engine.self_check import check, own_logits
from worker_service.engine.stages import Stage
from worker_service.engine.target import Sharers
from worker_service.engine.warm_up import WARM_UP_TOKENS
from worker_service.identity import fingerprint
from worker_service.loading import beside
from worker_service.model_files import ModelError, TooLittleMemoryError, at_home, check_directory
from worker_service.models import LoadedModel, choose_device, choose_dtype, load, load_alone, weights_taken
from worker_service.pace import Pace, PacedRunner
from worker_service.probes import make_probe
from worker_service.pull import find
from worker_service.rendezvous import gather, join, listen
from worker_service.ring import Leader, MakeLink, StageLink
from worker_service.runner import Runner
from worker_service.service import Loaded, serve
from worker_service.sizing import by_device, sized


async def load_engine(settings: Settings, group: ProcessGroup | None) -> Loaded:
    """The model and its engine. Raises ModelError. `group`: the processes that share the model with this one, which
    leads them."""
    return await _loaded(settings, await _run(group)(load_share, settings, group), group)


def _run(group: Sharers | None) -> Callable[..., Awaitable[Any]]:
    """How a load is run in a thread. Where other processes share the model, a stop waits for the load: those processes
    may be waiting for ours in it."""
    return asyncio.to_thread if group else beside


async def _lead_engine(settings: Settings, leader: Leader) -> Loaded:
    """As load_engine, over stages."""
    model = await asyncio.to_thread(_load, settings, Ranks.from_environment())
    await asyncio.to_thread(leader.loaded)
    return await _loaded(settings, model, leader)


async def _loaded(settings: Settings, model: LoadedModel, group: Sharers | None) -> Loaded:
    if by_device(settings, model.device, 2 if group else 1):
        settings = await _run(group)(sized, settings, model)
    check_kv_tokens(settings.kv_tokens, model.context_tokens)
    context_tokens = min(model.context_tokens, settings.kv_tokens)
    engine = await _run(group)(build_engine, settings, model, context_tokens, group)
    if settings.pace:
        runner: Runner = PacedRunner(engine, settings.slots, settings.threads, Pace(settings.pace))
    else:
        runner = Runner(engine, settings.slots, settings.threads)
    return Loaded(
        engine=engine,
        runner=runner,
        model=model,
        context_tokens=lambda: context_tokens,
        max_draft=settings.most_drafts,
        about={"dtype": str(model.dtype), "device": str(model.device), "weights": model.weights},
    )


def load_share(settings: Settings, group: ProcessGroup | None) -> LoadedModel:
    """The model, or this process's share of it once all others have loaded theirs. Raises ModelError, ParallelError."""
    model = _load(settings, group.ranks if group else Ranks())
    if group:
        group.loaded()
    return model


def _load(settings: Settings, ranks: Ranks) -> LoadedModel:
    folder, place = find(settings.model), settings.place
    check_directory(folder)
    device = choose_device(settings.device, ranks)
    dtype = choose_dtype(settings.dtype, device)
    if settings.attention == "flashinfer" and (why := problem(device, dtype)):
        raise ModelError(f"attention: {why}")
    if settings.attention == "graphs" and (device.type != "cuda" or ranks.size > 1):
        raise ModelError("attention: graphs are of a model that is whole on one GPU")
    least = by_device(settings, device, ranks.size * place.size)  # what more there is room for shows later
    drafts = place.number == 0 and ranks.leads
    check = partial(
        check_memory,
        folder,
        device,
        dtype,
        kv_tokens=WARM_UP_TOKENS if least else settings.blocks * settings.block_tokens,
        host_kv_tokens=0 if least else settings.host_blocks(device.type) * settings.block_tokens,
        shares=1 if place.size > 1 else ranks.size,
        place=place,
        drafter=drafter_memory(at_home(settings.drafter), dtype) if drafts else NO_DRAFTER,
    )
    alone = device.type == "cpu" and ranks.size == place.size == 1 and settings.attention == "auto"
    if alone and settings.weights in ("auto", "stored"):
        taken = weights_taken(folder, dtype, settings.block_tokens, settings.weights)
        check(weights=taken)
        try:
            return load_alone(folder, dtype, settings.block_tokens, settings.weights, taken)
        except ModelError as error:
            if taken == settings.weights:
                raise
            logging.getLogger(__name__).warning("weights are taken whole: %s", error)  # nobody has asked for others
    check(weights=settings.weights)
    if place.size > 1:
        return load(str(folder), str(device), settings.dtype, place=place)
    return load(str(folder), settings.device, settings.dtype, ranks, weights=settings.weights)


def share(settings: Settings) -> bool:
    """Of a model on several devices: lead, or compute a share of each pass until the leader ends. Returns, and raises,
    what `serve` does, and raises ParallelError."""
    ranks, drained = Ranks.from_environment(), False
    if not ranks.leads:
        _end_with_the_leader()
    group = ProcessGroup(ranks, choose_device(settings.device, ranks))
    if ranks.leads:
        drained = asyncio.run(serve(settings, lambda: load_engine(settings, group), find))
    else:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        SharedTarget(load_share(settings, group).model, group).follow()
    group.leave()
    return drained


def stage(settings: Settings, make: MakeLink = StageLink) -> bool:
    """Of a model over stages: lead, or compute this stage's layers of each pass until the leader ends. As `share`."""
    place, ranks, address = settings.place, Ranks.from_environment(), settings.rendezvous
    assert address is not None
    folder = find(settings.model)
    check_directory(folder)
    read_config(folder, place=place)
    dtype = choose_dtype(settings.dtype, choose_device(settings.device, ranks))
    about = {"model": fingerprint(folder), "dtype": str(dtype)}
    log = configure_logs("worker", settings.log_level, worker=settings.worker_id)
    log.info("meeting", stage=place.number, stages=place.size, rendezvous=address)
    if place.number == 0:
        leader = gather(place, listen(address, place.size), about, make)
        return asyncio.run(_lead(settings, leader))
    if ranks.size > 1:
        _end_with_the_leader()
    follower = join(place, address, about, make)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    try:
        model = _load(settings, ranks).model
    except TooLittleMemoryError:
        raise  # not told: the first takes what it is told for what starting again cannot mend
    except ModelError as error:
        follower.loaded(problem=str(error))
        raise
    follower.loaded()
    follower.follow(Stage(model, last=follower.last))
    return False


async def _lead(settings: Settings, leader: Leader) -> bool:
    problem: str | None = None
    drained = False

    async def work() -> None:
        nonlocal drained
        drained = await serve(settings, lambda: _lead_engine(settings, leader), find)

    try:
        await first_of(work, leader.lost)
        problem = ""
        return drained
    except ModelError as error:
        problem = None if isinstance(error, TooLittleMemoryError) else str(error)
        raise
    finally:
        leader.leave(problem)


def _end_with_the_leader() -> None:
    """torchrun signals all processes, and so does a terminal that closes. The leader decides when to end, and its last
    step needs every share."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def build_engine(settings: Settings, model: LoadedModel, context_tokens: int, group: Sharers | None = None) -> Engine:
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
            max_prefill=settings.max_prefill,
            max_draft=settings.most_drafts,
            drafter=make_drafter(
                settings.drafter,
                model,
                blocks=settings.blocks,
                block_tokens=settings.block_tokens,
                attention=settings.attention,
                caller=Caller(settings.worker_id, settings.drafter_names, settings.tls),
            ),
            group=group,
            probe=make_probe(settings.probe, model),
            attention=settings.attention,
        )
        if expected is not None:
            check(engine, expected)
    except (ModelError, ParallelError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model of its own kind does in a pass, before it answers anybody
        name = type(model.model).__name__
        raise ModelError(f"{settings.model}: the engine cannot serve this {name}: {summary(error)}") from error
    return engine
