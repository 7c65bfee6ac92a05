"""A model, and our own engine for it, from a worker's settings. It brings torch along: `__main__` imports it while the
service says already that this worker is coming."""

import asyncio
import signal

import torch

from worker_service.capacity import check_kv_tokens, check_memory, summary
from worker_service.config import Settings
from worker_service.drafters import make_drafter
from worker_service.engine.engine import Engine
from worker_service.engine.parallel import Group, ParallelError, Ranks, SharedTarget
from worker_service.engine.self_check import check, own_logits
from worker_service.model_files import ModelError, check_directory
from worker_service.models import LoadedModel, choose_device, choose_dtype, load
from worker_service.pace import Pace, PacedRunner
from worker_service.pull import find
from worker_service.runner import Runner
from worker_service.service import Loaded, serve


async def load_engine(settings: Settings, group: Group | None) -> Loaded:
    """The model and its engine. Raises ModelError. `group`: the processes that share the model with this one, which
    leads them."""
    model = await asyncio.to_thread(load_share, settings, group)
    check_kv_tokens(settings.kv_tokens, model.context_tokens)
    context_tokens = min(model.context_tokens, settings.kv_tokens)
    engine = await asyncio.to_thread(build_engine, settings, model, context_tokens, group)
    if settings.pace:
        runner: Runner = PacedRunner(engine, settings.slots, settings.threads, Pace(settings.pace))
    else:
        runner = Runner(engine, settings.slots, settings.threads)
    return Loaded(
        engine=engine,
        runner=runner,
        model=model,
        context_tokens=lambda: context_tokens,
        max_draft=settings.max_draft,
        about={"dtype": str(model.dtype), "device": str(model.device)},
    )


def load_share(settings: Settings, group: Group | None) -> LoadedModel:
    """The model, or this process's share of it once all others have loaded theirs. Raises ModelError, ParallelError."""
    ranks, folder = group.ranks if group else Ranks(), find(settings.model)
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
    model = load(str(folder), settings.device, settings.dtype, ranks)
    if group:
        group.loaded()
    return model


def share(settings: Settings) -> bool:
    """Of a model on several devices: lead, or compute a share of each pass until the leader ends. Returns, and raises,
    what `serve` does, and raises ParallelError."""
    ranks, drained = Ranks.from_environment(), False
    if not ranks.leads:
        # torchrun signals all processes. The leader decides when to end, and its last step needs every share.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    group = Group(ranks, choose_device(settings.device, ranks))
    if ranks.leads:
        drained = asyncio.run(serve(settings, lambda: load_engine(settings, group), find))
    else:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        SharedTarget(load_share(settings, group).model, group).follow()
    group.leave()
    return drained


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
    except (ModelError, ParallelError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model of its own kind does in a pass, before it answers anybody
        name = type(model.model).__name__
        raise ModelError(f"{settings.model}: the engine cannot serve this {name}: {summary(error)}") from error
    return engine
