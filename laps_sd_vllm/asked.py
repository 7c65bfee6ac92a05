"""A request of vLLM as the core takes it: class, hint and tenant from `priority` and `vllm_xargs`. Decides nothing."""

from typing import Any

from scheduler_service.core.types import Request, RequestClass
from scheduler_service.predictor.features import of_prompt
from scheduler_service.predictor.port import Features

CLASSES = {"interactive": RequestClass.INTERACTIVE, "default": RequestClass.DEFAULT, "batch": RequestClass.BATCH}
MOST_HINT = 1 << 24  # tokens


def asked(request: Any, context_tokens: int) -> tuple[Request, Features, bool]:
    """The request, what a predictor may know of it, and whether one of its `laps_sd_*` arguments is none: that is left
    out. They are `laps_sd_tokens`, the output expected; `laps_sd_class`, beside priority (below 0 is interactive, above
    0 batch); `laps_sd_tenant`, else the cache salt."""
    params = request.sampling_params
    said: dict[str, Any] = (params.extra_args or {}) if params is not None else {}
    hint, klass, tenant = said.get("laps_sd_tokens"), said.get("laps_sd_class"), said.get("laps_sd_tenant")
    bad = False
    if hint is not None and (isinstance(hint, bool) or not isinstance(hint, int | float) or not 1 <= hint <= MOST_HINT):
        hint, bad = None, True
    of_class = CLASSES[("interactive", "default", "batch")[(request.priority >= 0) + (request.priority > 0)]]
    if klass is not None:
        known = isinstance(klass, str) and klass in CLASSES  # vLLM lets lists pass
        of_class, bad = CLASSES[klass] if known else of_class, bad or not known
    if tenant is not None and not isinstance(tenant, str | int):
        tenant, bad = None, True
    prompt = request.prompt_token_ids or ()
    most = max(1, min(request.max_tokens, context_tokens - request.num_prompt_tokens))
    features = of_prompt(prompt, most, of_class, stop=_stops(params), ignore_eos=bool(params and params.ignore_eos))
    of_core = Request(
        request.request_id,
        request.arrival_time,
        request.num_prompt_tokens,
        most,
        of_class,
        predicted_tokens=None if hint is None else int(hint),
        tenant=str(tenant if tenant is not None else request.cache_salt or ""),
    )
    return of_core, features, bad


def _stops(params: Any) -> list[str]:
    stop = params.stop if params is not None else None
    return [stop] if isinstance(stop, str) else list(stop or ())
