"""`python -m worker_service`: a worker with our own engine, from its settings. What loads long is imported beside the
service, which is up at once."""

import asyncio
import faulthandler
import gc
import os
import signal
import sys
from types import ModuleType

import structlog

from protos.logs import trace
from protos.settings import BAD_SETTINGS, LEFT, read
from worker_service.config import Settings
from worker_service.loading import beside, leave
from worker_service.model_files import ModelError, TooLittleMemoryError
from worker_service.pull import find
from worker_service.service import Loaded, serve


def _own_engine() -> ModuleType:
    gc.disable()  # a fifth of these imports would be searches for garbage, and modules are none
    try:
        from worker_service import own_engine
    finally:
        gc.freeze()
        gc.enable()
    return own_engine


async def _load(settings: Settings) -> Loaded:
    loaded: Loaded = await (await beside(_own_engine)).load_engine(settings, None)
    return loaded


def main() -> int:
    faulthandler.enable()  # where a library crashes the process, its stacks are told
    settings = read(Settings, "worker")
    rank, size = (int(os.environ.get(name, alone)) for name, alone in (("RANK", 0), ("WORLD_SIZE", 1)))  # of torchrun
    name = "worker" if size == 1 else f"worker, process {rank + 1} of {size}"
    if settings.stages > 1:
        name = f"worker, stage {settings.place.number} of {settings.stages}"
    try:
        if settings.stages > 1:
            left = _own_engine().stage(settings)
        elif size > 1:
            left = _own_engine().share(settings)
        else:
            left = asyncio.run(serve(settings, lambda: _load(settings), find))
        if left:
            sys.stderr.write(f"{name}: {LEFT}\n")
    except KeyboardInterrupt:  # where no loop runs: a stage that waits for the others
        return 128 + signal.SIGINT
    except (OSError, ModelError) as error:  # a sentence, not a traceback
        sys.stderr.write(f"{name}: {error}\n")
        hopeless = isinstance(error, ModelError) and not isinstance(error, TooLittleMemoryError)
        return BAD_SETTINGS if hopeless else 1
    except Exception as error:  # of the model: the supervisor starts another worker, and the requests go on elsewhere
        structlog.get_logger().bind(service="worker").error("failed", trace=trace(error))
        return 1
    return 0


if __name__ == "__main__":
    leave(main())
