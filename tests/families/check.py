"""One family at a time: a tiny model of it goes through what a worker does at its start, answers, and is compared with
transformers. No test framework here: a machine with a GPU need not have one."""

import random
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

from tests.families.table import FAMILIES, SIZES, Family
from worker_service.capacity import check_kv_tokens, model_class, summary
from worker_service.engine import native
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.self_check import check, own_logits
from worker_service.engine.types import Admission, Limits, Run, Sampling
from worker_service.model_files import ModelError, check_directory
from worker_service.models import load

NEW = 24  # tokens of each output
CLEAR = 1e-3  # float32 sums of another shape differ by less
BLOCK_TOKENS, BLOCKS = 16, 96


class Verdict(NamedTuple):
    """`word`: works, refused, WRONG or CRASHES; `note`: how it was computed, or what is the matter."""

    word: str
    note: str
    seconds: float

    @property
    def bad(self) -> bool:
        return self.word.isupper()


def judge(name: str, folder: Path, device: str = "cpu", dtype: str = "float32", kernels: bool = True) -> Verdict:
    """Compared in float32; in bfloat16 it has to pass the self-check and to answer. `kernels` False: without the native
    kernels, as on a GPU. `folder` gets the model. Never raises."""
    begun, family = time.perf_counter(), FAMILIES[name]
    try:
        if not any(folder.iterdir()):
            save(family, folder)
        with patch.object(native, "kernels", native.kernels if kernels else lambda: None):
            word, note = _serve_and_compare(family, folder, device, dtype)
    except Exception as error:
        where = "".join(traceback.format_tb(error.__traceback__)[-2:])
        word, note = "CRASHES", f"{type(error).__name__}: {error}\n{where}"
    return Verdict(word, note, time.perf_counter() - begun)


def _serve_and_compare(family: Family, folder: Path, device: str, dtype: str) -> tuple[str, str]:
    try:
        engine = start(folder, device, dtype, family.context)
    except ModelError as error:
        return "refused", str(error)
    asked = engine.target.asked
    if (windows := tuple(asked[layer].window for layer in sorted(asked))) != family.windows:
        return "WRONG", f"windows of its layers: {windows}, not {family.windows}"
    prompts = texts(SIZES["vocab_size"], family.context)
    outputs, logprobs, drafts = answers(engine, prompts)
    if dtype != "float32":  # rounding may send a token to other experts, which makes another text of it
        return "works", f"starts and answers; {drafts}"
    del engine
    reference = load(str(folder), device, dtype).model
    if getattr(reference.config, "attn_logit_softcapping", None):  # older transformers leave the cap out, unless asked
        reference.set_attn_implementation("eager")
    problems = [
        problem for each in zip(prompts, outputs, logprobs, strict=True) if (problem := difference(reference, *each))
    ]
    return ("WRONG", problems[0]) if problems else ("works", drafts)


def start(folder: Path, device: str, dtype: str, context_tokens: int) -> Engine:
    """An engine that has passed the self-check, as a worker makes it. Raises ModelError."""
    check_directory(folder)
    loaded = load(str(folder), device, dtype)
    context_tokens = min(context_tokens, loaded.context_tokens)
    check_kv_tokens(BLOCKS * BLOCK_TOKENS, loaded.context_tokens)
    try:
        expected = own_logits(loaded.model, context_tokens)
        engine = Engine(
            loaded.model,
            loaded.tokenizer,
            eos_ids=frozenset(),
            context_tokens=context_tokens,
            blocks=BLOCKS,
            block_tokens=BLOCK_TOKENS,
            drafter=NgramDrafter(),
        )
        check(engine, expected)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ModelError(f"the engine cannot serve this {type(loaded.model).__name__}: {summary(error)}") from error
    return engine


def save(family: Family, folder: Path) -> None:
    """Config, random weights and a tokenizer. The weights are so wide that texts vary and nothing is without effect."""
    sizes = {key: value for key, value in (SIZES | family.changes).items() if value is not None}
    if family.eyes is None:
        config = AutoConfig.for_model(family.kind, **sizes)
    else:
        config = AutoConfig.for_model(family.kind, text_config=sizes, vision_config=family.eyes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = model_class(config)._from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() > 1:
                    weight.normal_(0.0, 0.15)
                elif "A_log" not in name and "dt_bias" not in name:
                    weight.add_(torch.randn_like(weight), alpha=1.0 if "sinks" in name else 0.1)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(SIZES["vocab_size"])}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0"))).save_pretrained(folder)


def texts(vocab_size: int, context_tokens: int) -> list[list[int]]:
    """Prompts: short, repetitive, and longer than several windows where the context allows it."""
    chance = random.Random(3)
    phrase = [chance.randrange(2, vocab_size) for _ in range(9)]
    longest = min(context_tokens, 200) - NEW
    strange = [chance.randrange(2, vocab_size) for _ in range(longest - 2 * len(phrase) - 3)]
    return [phrase[:5], phrase * 4 + phrase[:2], strange + phrase * 2 + phrase[:3]]


def answers(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]], str]:
    """Greedy outputs of all at once with their log-probabilities, prefilled in chunks, with drafts; and how many."""
    outputs: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        limits = Limits(NEW, ignore_eos=True)
        engine.admit(Admission(str(i), 1, prompt, len(prompt), Sampling(logprobs=0), limits))
    drafted = accepted = 0
    while rows := engine.step([Run(str(i), 3, 32) for i in range(len(prompts))], len(prompts)).ran:
        for row in rows:
            if row.error:
                raise RuntimeError(row.error)
            outputs[int(row.request_id)].extend(row.tokens)
            logprobs[int(row.request_id)].extend(each.logprob for each in row.logprobs)
            drafted, accepted = drafted + row.drafted, accepted + row.accepted
    return outputs, logprobs, f"{accepted} of {drafted} drafts accepted"


@torch.inference_mode()
def difference(model: Any, prompt: list[int], output: list[int], own: list[float]) -> str:
    """Empty where every token of `output` is one that `model` finds best, in one pass over the whole text, and `own`
    log-probabilities are its."""
    if len(output) != NEW:
        return f"{len(output)} tokens, not {NEW}"
    ids = torch.tensor([prompt + output], device=model.device)
    logprobs = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).cpu()
    chosen = logprobs.gather(-1, torch.tensor(output)[:, None])[:, 0]
    behind = logprobs.max(-1).values - chosen
    off = (chosen - torch.tensor(own)).abs()
    if not float(behind.max()) <= CLEAR:
        at = int(behind.argmax())
        return f"token {at} after {len(prompt)} is {float(behind[at]):.3g} behind the best one"
    if not float(off.max()) <= CLEAR:
        return f"a token's log-probability after {len(prompt)} is {float(off.max()):.3g} off"
    return ""
