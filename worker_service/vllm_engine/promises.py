"""Promises of this service that vLLM does not keep: fields that are refused, with the reason, and sentences that
clients are told. Plain data; nothing is checked here."""

STRUCTURE = "output with a structure is not served while the worker's engine is vLLM"
LOGIT_BIAS = "vLLM may ignore it with speculative decoding; it is served with --drafter none"
PROMPT = "not served while the worker's engine is vLLM"
EXACT = "float32"


def refused(*, speculating: bool) -> dict[str, str]:
    """By field of a request: why it is refused."""
    always = {"structure": STRUCTURE, "prompt_logprobs": PROMPT, "embedding": PROMPT}
    return always | ({"logit_bias": LOGIT_BIAS} if speculating else {})


def caveats(*, speculating: bool, dtype: str) -> list[str]:
    """A sentence for each promise that is not kept."""
    if speculating:
        seeds = "Sampled text depends on the drafts and thereby on the load: a seed does not repeat it."
    else:
        seeds = "A seed repeats a sampled text only while the request stays on one worker."
    told = [
        seeds,
        "Once a request has moved to another worker, its presence and frequency penalties count only later output.",
    ]
    if dtype != EXACT:
        told.append(f"In {dtype} the greedy text may depend on what else runs in the same step.")
    return told
