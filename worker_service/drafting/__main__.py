"""`python -m worker_service.drafting`: a drafter, from its settings. What loads long is imported beside the service,
whose health is told at once."""

import asyncio
import sys

from protos.logs import configure_logs, trace
from protos.settings import BAD_SETTINGS, read
from worker_service.drafting.config import Settings
from worker_service.drafting.service import Loaded, serve
from worker_service.loading import beside, leave
from worker_service.model_files import ModelError, TooLittleMemoryError


def load(settings: Settings) -> Loaded:
    """Raises ModelError."""
    from worker_service.capacity import check_memory
    from worker_service.drafters import vocabulary_digest
    from worker_service.drafting.passes import Passes
    from worker_service.drafting.session import WIDEST_FAN
    from worker_service.engine.shape import longest_text
    from worker_service.engine.target import Target
    from worker_service.models import choose_device, choose_dtype
    from worker_service.models import load as load_model
    from worker_service.pull import find

    folder = find(settings.model)
    device = choose_device(settings.device)
    check_memory(
        folder, device, choose_dtype(settings.dtype, device), kv_tokens=settings.kv_tokens, host_kv_tokens=0, shares=1
    )
    model = load_model(str(folder), settings.device, settings.dtype)
    try:
        passes = Passes(
            Target(model.model),
            context_tokens=longest_text(model.model.config),
            blocks=settings.blocks,
            block_tokens=settings.block_tokens,
            lines=settings.chains,
            fan=WIDEST_FAN,
        )
    except (ValueError, NotImplementedError) as error:
        raise ModelError(f"{settings.model}: cannot draft with it: {error}") from error
    return Loaded(passes=passes, name=model.name, vocabulary=vocabulary_digest(model.tokenizer))


def main() -> int:
    settings = read(Settings, "drafter")
    log = configure_logs("drafter", settings.log_level)
    try:
        asyncio.run(serve(settings, lambda: beside(load, settings)))
    except (OSError, ModelError) as error:  # a sentence, not a traceback
        sys.stderr.write(f"drafter: {error}\n")
        hopeless = isinstance(error, ModelError) and not isinstance(error, TooLittleMemoryError)
        return BAD_SETTINGS if hopeless else 1
    except Exception as error:  # of the model: the supervisor starts another one
        log.error("failed", trace=trace(error))
        return 1
    return 0


if __name__ == "__main__":
    leave(main())
