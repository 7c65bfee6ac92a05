"""One admission inside the engine of vLLM: its tokens, when it ends, and how vLLM is asked for it. vLLM's scheduler is
not touched here."""

import math
import time
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest

from worker_service.engine.stop import StopStrings
from worker_service.engine.types import Admission, Finish, Held, Logprob, Row, Sampling, Skip

_SEEDS = 1 << 63  # torch takes no larger ones
# vLLM 0.32 on a CPU ends with a top-k alone in a step in which no text has drafts. With a top-p beside it, it takes
# another path. In vLLM's float32 this number is 1, so no token is left out.
_NEARLY_ALL = math.nextafter(1.0, 0.0)


@dataclass(slots=True)
class EngineRequest:
    """An admission as vLLM knows it. `internal`: its id there, new for each admission, so that what vLLM still does for
    an earlier one is not taken for this one's. vLLM takes the output that exists for a part of the prompt."""

    admission: Admission
    internal: str
    tokens: list[int]
    before: int  # output tokens that it came with
    remaining: int  # that it may still emit, when it came
    stops: StopStrings
    error: str
    emitted: int = 0  # tokens that vLLM has made for it
    finish: Finish | None = None
    asked: bool = False  # vLLM has been given it

    @property
    def id(self) -> str:
        return self.admission.request_id

    @property
    def output_tokens(self) -> int:
        return max(len(self.tokens) - self.admission.prompt_len, 0)

    @property
    def placement(self) -> int:
        return self.admission.placement

    def agrees(self, admission: Admission) -> bool:
        """Whether the same request is admitted with the very tokens that it has, so that its KV can stay as it is."""
        same = (admission.sampling, admission.limits, admission.salt, admission.prompt_len)
        mine = (self.admission.sampling, self.admission.limits, self.admission.salt, self.admission.prompt_len)
        return self.asked and self.finish is None and same == mine and self.tokens == list(admission.tokens)

    def stopped_by(self, token: int) -> bool:
        """Whether this token of output, the next one, ends it by a stop string."""
        self.emitted += 1
        completes = self.stops.push(token)
        return completes and self.before + self.emitted >= self.admission.limits.min_tokens

    def row(self, start: int, **fields: Any) -> Row:
        return Row(self.id, self.placement, start, finish=self.finish, error=self.error, **fields)

    def skipped(self, blocks: int, num_uncomputed: int, why: Skip = Skip.NO_BLOCKS) -> Row:
        return self.row(self.output_tokens, blocks=blocks, num_uncomputed=num_uncomputed, skipped=why)

    def held(self, blocks: int, num_uncomputed: int) -> Held:
        return Held(self.id, self.placement, self.output_tokens, blocks=blocks, num_uncomputed=num_uncomputed)


def problem(admission: Admission, vocab_size: int, context_tokens: int, refused: dict[str, str]) -> str:
    """Why it cannot be run; empty if it can. The gateway refuses most of it before."""
    if admission.error:
        return admission.error
    tokens, prompt_len, sampling = admission.tokens, admission.prompt_len, admission.sampling
    if not 0 < prompt_len <= len(tokens):
        return f"tokens: {len(tokens)} cannot begin with a prompt of {prompt_len}"
    for name, ids in (("tokens", tokens), ("logit_bias", [i for i, _ in sampling.logit_bias])):
        strange = next((token for token in ids if not 0 <= token < vocab_size), None)
        if strange is not None:
            return f"{name}: {strange} is not in the vocabulary of {vocab_size}"
    if prompt_len >= context_tokens:
        return f"tokens: a prompt of {prompt_len} leaves no place in a context of {context_tokens}"
    given = {
        "structure": bool(sampling.grammar),
        "logit_bias": bool(sampling.logit_bias),
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "embedding": sampling.embedding,
    }
    field = next((name for name, is_given in given.items() if is_given and name in refused), None)
    return f"{field}: {refused[field]}" if field else ""


def ask(request: EngineRequest, eos_ids: frozenset[int]) -> EngineCoreRequest:
    """The parameters for vLLM. Raises ValueError or VLLMError for what it refuses."""
    admission = request.admission
    return EngineCoreRequest(
        request_id=request.internal,
        prompt_token_ids=list(admission.tokens),
        mm_features=None,
        sampling_params=_parameters(request, admission.sampling, eos_ids),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=admission.salt or None,
        data_parallel_rank=None,
    )


def _parameters(request: EngineRequest, sampling: Sampling, eos_ids: frozenset[int]) -> SamplingParams:
    limits = request.admission.limits
    least = max(limits.min_tokens - request.before, 0)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=min(sampling.top_p, _NEARLY_ALL) if sampling.top_k else sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed % _SEEDS if sampling.temperature else None,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        logprobs=sampling.logprobs,
        max_tokens=request.remaining,
        min_tokens=min(least, request.remaining),
        # As stop ids, since a model may have several ends and EngineCore knows only one.
        stop_token_ids=[] if limits.ignore_eos else sorted(eos_ids),
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def logprobs(lists: Any, tokens: int, top: int) -> tuple[Logprob, ...]:
    """Of the first `tokens` positions in vLLM's LogprobsLists: ids and values [positions, 1 + alternatives], of which
    the first is the token that was drawn."""
    return tuple(
        Logprob(float(values[0]), tuple(zip(map(int, ids[1 : top + 1]), map(float, values[1 : top + 1]), strict=True)))
        for ids, values in zip(lists.logprob_token_ids[:tokens], lists.logprobs[:tokens], strict=True)
    )
