"""`python -m worker_service.vllm_engine`: a worker whose engine is vLLM, from its settings. It runs in the environment
that vLLM is installed in."""

import asyncio
import os
import sys

import structlog

from protos.logs import configure_logs, trace
from protos.settings import BAD_SETTINGS, LEFT, read
from worker_service.model_files import ModelError
from worker_service.service import Loaded, serve
from worker_service.vllm_engine.config import Settings


def main() -> None:
    settings = read(Settings, "worker")
    _prepare(settings)
    try:
        if asyncio.run(_serve(settings)):
            sys.stderr.write(f"worker: {LEFT}\n")
    except (OSError, ModelError) as error:  # a sentence, not a traceback
        sys.stderr.write(f"worker: {error}\n")
        sys.exit(BAD_SETTINGS if isinstance(error, ModelError) else 1)
    except Exception as error:  # of the model: the supervisor starts another worker, and the requests go on elsewhere
        structlog.get_logger().bind(service="worker").error("failed", trace=trace(error))
        sys.exit(1)


def _prepare(settings: Settings) -> None:
    """The environment that vLLM reads when it is imported. Variables that somebody has set stay."""
    told = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine core is in this process
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING" if settings.log_level in ("info", "warning") else settings.log_level.upper(),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several workers would be bound to the same cores
    }
    if settings.threads:
        told["OMP_NUM_THREADS"] = str(settings.threads)
    for name, value in told.items():
        os.environ.setdefault(name, value)


async def _serve(settings: Settings) -> bool:
    """As `serve`."""
    from worker_service.runner import Runner
    from worker_service.vllm_engine.engine import VllmEngine
    from worker_service.vllm_engine.model import configure

    engines: list[VllmEngine] = []

    async def load() -> Loaded:
        configured = await asyncio.to_thread(configure, settings)
        model = configured.model
        engine = VllmEngine(
            configured.config,
            model.tokenizer.backend_tokenizer,
            eos_ids=model.eos_ids,
            max_draft=configured.max_draft,
            refused=dict(model.refused),
        )
        engines.append(engine)
        log = configure_logs("worker", settings.log_level, worker=settings.worker_id)
        log.warning("not_promised", refused=dict(model.refused), caveats=list(model.caveats))
        return Loaded(
            engine=engine,
            runner=Runner(engine, settings.slots, settings.threads),
            model=model,
            context_tokens=lambda: engine.context_tokens,
            max_draft=configured.max_draft,
            about=configured.about,
        )

    try:
        return await serve(settings, load)
    finally:
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    main()
