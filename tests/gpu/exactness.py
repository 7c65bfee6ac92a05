"""Whether the text depends on nothing but the request: on no batch, drafter, chunk of prefill or preemption; and
whether it is the text that the model alone, and a CPU, would give."""

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.gpu.forking import Forking
from worker_service.engine import native
from worker_service.engine.drafting.drafter import ALL, Drafter, NoDrafter
from worker_service.engine.drafting.head import DraftHead, DraftHeadConfig
from worker_service.engine.drafting.head_drafter import HeadDrafter
from worker_service.engine.drafting.model import ModelDrafter
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.graphs import Graphs
from worker_service.engine.hooks import HOOKS, LogitsContext
from worker_service.engine.pass_costs import PassCosts
from worker_service.engine.self_check import check as self_check
from worker_service.engine.self_check import own_logits
from worker_service.engine.types import Admission, Limits, Run, Sampling

if TYPE_CHECKING:
    from tests.gpu.sections import Section

_VOCABULARY, _CONTEXT, _MOST_NEW = 512, 512, 32
_CLEAR = 2e-3  # between the best logit and the chosen one, in float32
SAMPLINGS = (
    Sampling(logprobs=3),
    Sampling(temperature=0.9, seed=11, logprobs=0),
    Sampling(temperature=1.2, top_p=0.8, top_k=40, seed=12),
    Sampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    Sampling(temperature=0.7, seed=13, logit_bias=((7, 4.0), (9, -50.0))),
)


def check(section: "Section") -> None:
    sizes = section.size.requests, min(section.size.tokens, _MOST_NEW)
    for dtype in (torch.float32, torch.bfloat16):
        expected = _texts(engine_on(section.device, dtype, NoDrafter()), *sizes, disturbed=False)
        if dtype == torch.float32:
            _compare_with_the_model(section, expected)
        texts = zip(prompts(len(expected)), expected, strict=True)
        forking = Forking({str(i): [*prompt, *output] for i, (prompt, output) in enumerate(texts)})
        for kind, drafter in (_drafters(section.device, dtype) | {"several chains": forking}).items():
            engine = engine_on(section.device, dtype, drafter)
            if drafter is forking:
                engine.weigh_drafts(PassCosts(0.01, 0.0))  # any number of rows takes as long
            different = _different(expected, _texts(engine, *sizes, disturbed=True))
            name = str(dtype).removeprefix("torch.")
            section.add("drafters", {"drafter": kind, "dtype": name, "tokens_that_differ": different})
            if dtype == torch.float32 and different > 0.1:  # one flip of rounding may change the rest of one text
                section.wrong(f"{kind} in {name}: {different:.1%} of tokens are not those of plain decoding")
            if section.left_s < 10:
                section.put(stopped="time was short")
                return
        if forking.chains < 2:
            section.wrong("no request had several chains of drafts")
    _compare_hooks(section)
    if section.device.type != "cpu":
        cpu = torch.device("cpu")
        here = _texts(engine_on(section.device, torch.float32, NoDrafter()), *sizes, disturbed=False)
        with patch.object(native, "kernels", lambda: None):  # which would be compiled first
            there = _texts(engine_on(cpu, torch.float32, NoDrafter()), *sizes, disturbed=False)
        section.put(tokens_unlike_a_cpus=_different(there, here))
    section.put(done=True)


def model_on(device: torch.device, dtype: torch.dtype, seed: int = 0) -> Any:
    """A random causal LM whose texts vary: the same weights on every device."""
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_CONTEXT,
        initializer_range=0.12,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(device, dtype).eval().requires_grad_(False)


def tokenizer() -> Any:
    words = {f"w{i}": i for i in range(_VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))


def prompts(count: int) -> list[list[int]]:
    """Of lengths from 3 to 300, with repetitions: n-grams are found."""
    chance, found = Random(1), []
    for i in range(count):
        phrase = [chance.randrange(_VOCABULARY) for _ in range(chance.randrange(3, 20))]
        found.append((phrase * 40)[: (3, 25, 70, 300)[i % 4]])
    return found


def _drafters(device: torch.device, dtype: torch.dtype) -> dict[str, Drafter]:
    embeddings = model_on(device, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        head = DraftHead(DraftHeadConfig("", "", 128, 64, _VOCABULARY))
    head.draft_ids.copy_(torch.arange(_VOCABULARY))
    rows = embeddings.get_output_embeddings().weight
    return {
        "none": NoDrafter(),  # of several requests at once
        "ngram": NgramDrafter(),
        "head": HeadDrafter(head, embeddings.get_input_embeddings().weight, rows, price=ALL),
        "the model itself": ModelDrafter(model_on(device, dtype), context_tokens=_CONTEXT, blocks=256, block_tokens=16),
    }


class _Emptied:
    """A graph whose results are no numbers before each replay, so that one that writes nothing is found."""

    def __init__(self, work: Any, device: torch.device, like: Any, kind: Any) -> None:
        self._graph, self._results = kind(work, device, like and like._graph), ()

    def replay(self) -> Any:
        for each in filter(torch.is_tensor, self._results):
            each.fill_(torch.nan)
        self._results = self._graph.replay()
        return self._results


def check_graphs(section: "Section") -> None:
    """Whether texts are the same where passes are padded and replayed."""
    with patch.object(Graphs, "kind", staticmethod(partial(_Emptied, kind=Graphs.kind))):  # from 3.14 on it would bind
        _check_graphs(section)


def _check_graphs(section: "Section") -> None:
    sizes = section.size.requests, min(section.size.tokens, _MOST_NEW)
    for dtype in (torch.float32, torch.bfloat16):
        found = []
        for attention in ("torch", "graphs"):
            engine = engine_on(section.device, dtype, NgramDrafter(), attention)
            found.append(_texts(engine, *sizes, disturbed=True))
        check_recorded(section, engine)
        name, different = str(dtype).removeprefix("torch."), _different(*found)
        section.add("drafters", {"drafter": "ngram, as graphs", "dtype": name, "tokens_that_differ": different})
        if dtype == torch.float32 and different > 0.1:
            section.wrong(f"as graphs {different:.1%} of tokens in {name} are others")


def check_recorded(section: "Section", engine: Engine) -> None:
    """Where no graph can be recorded the engine goes on without, and texts are the same."""
    graphs = engine.target._graphs
    if graphs is None or not graphs._known:
        section.wrong("passes were computed without graphs")


def engine_on(device: torch.device, dtype: torch.dtype, drafter: Drafter, attention: str = "auto") -> Engine:
    """One that has passed the self-check."""
    model = model_on(device, dtype)
    expected = own_logits(model, _CONTEXT)
    engine = Engine(
        model,
        tokenizer(),
        eos_ids=frozenset(),
        context_tokens=_CONTEXT,
        blocks=512,
        block_tokens=16,
        host_blocks=512,
        drafter=drafter,
        attention=attention,
    )
    self_check(engine, expected)
    return engine


def _texts(engine: Engine, requests: int, tokens: int, *, disturbed: bool) -> list[list[int]]:
    """So many `tokens` of each request. `disturbed`: in batches, with drafts and preemptions; else alone, without."""
    chance, outputs = Random(2), [list[int]() for _ in range(requests)]
    all_prompts = prompts(requests)

    def admit(i: int) -> None:
        sampling = SAMPLINGS[i % len(SAMPLINGS)]
        limits = Limits(tokens, ignore_eos=True)
        engine.admit(Admission(str(i), 1, all_prompts[i], len(all_prompts[i]), sampling, limits))

    def step(names: Sequence[int], drafts: int, prefill: int) -> list[int]:
        """Returns those that go on."""
        ended = set()
        for row in engine.step([Run(str(i), drafts, prefill) for i in names], len(names)).rows:
            outputs[int(row.request_id)].extend(row.tokens)
            if row.error:
                raise RuntimeError(row.error)
            if row.finish is not None:
                ended.add(int(row.request_id))
        return [i for i in names if i not in ended]

    if not disturbed:
        for i in range(requests):
            admit(i)
            live = [i]
            while live:
                live = step(live, 0, 512)
            engine.forget(str(i))
        return outputs
    live = list(range(requests))
    for i in live:
        admit(i)
    while live:
        running = chance.sample(live, chance.randint(1, len(live)))
        ended = set(running) - set(step(running, chance.randint(0, 6), chance.choice([8, 64, 512])))
        live = [i for i in live if i not in ended]
        if live:
            chance.choice([engine.offload, engine.drop, lambda _: None])(str(chance.choice(live)))
    for i in range(requests):
        engine.forget(str(i))
    return outputs


def _different(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> float:
    """The share of tokens from the first difference of each text on."""
    total = sum(map(len, expected))
    same = 0
    for one, other in zip(expected, found, strict=True):
        same += next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return 1 - same / total


@torch.inference_mode()
def _compare_with_the_model(section: "Section", found: Sequence[Sequence[int]]) -> None:
    """Greedy texts against one pass of the module over each."""
    model = model_on(section.device, torch.float32)
    furthest = 0.0
    for i, (prompt, output) in enumerate(zip(prompts(len(found)), found, strict=True)):
        if SAMPLINGS[i % len(SAMPLINGS)] != SAMPLINGS[0]:
            continue
        ids = torch.tensor([prompt + list(output)], device=section.device)
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().cpu()
        chosen = logits.gather(-1, torch.tensor(output)[:, None])[:, 0]
        furthest = max(furthest, float((logits.max(-1).values - chosen).max()))
    section.put(behind_the_models_best_logit=furthest)
    if not furthest <= _CLEAR:
        section.wrong(f"greedy: a token is {furthest:.3g} behind the one that the model prefers")


def _compare_hooks(section: "Section") -> None:
    """Masks, bias and penalties on the device against the CPU's."""
    logits = torch.randn(3, _VOCABULARY, generator=torch.Generator().manual_seed(0))
    allowed = torch.randint(0, 256, (3, _VOCABULARY // 8), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    sampling = Sampling(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1, logit_bias=((5, 2.0),))
    context = LogitsContext([1, 2, 3, 4, 5], [6, 7], 2, sampling, Limits(9, min_tokens=4), frozenset({3}), allowed)
    results = []
    for device in (torch.device("cpu"), section.device):
        own = logits.clone().to(device)
        for hook in HOOKS:
            own = hook(own, context)
        results.append(own.cpu())
    same = torch.allclose(*results, atol=1e-5)
    section.put(hooks_agree_with_the_cpus=same)
    if not same:
        section.wrong("masks, bias or penalties differ from the CPU's")
