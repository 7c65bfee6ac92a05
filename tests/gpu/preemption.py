"""The cost to give way to others and to come back: with the KV kept, offloaded to the host, or dropped."""

from time import perf_counter
from typing import TYPE_CHECKING

import torch

from tests.gpu.bench import BLOCK_TOKENS, prompts
from worker_service.bench import floor, synthetic
from worker_service.engine.drafting.drafter import NoDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.types import Admission, Limits, Run, Sampling

if TYPE_CHECKING:
    from tests.gpu.sections import Section

_BEFORE, _AFTER = 4, 4  # tokens of each request around its preemption
_PREFILL = 1024
WAYS = ("keep", "offload", "drop")


def check(section: "Section") -> None:
    requests, tokens = section.size.preempted
    shape = synthetic.SHAPES[section.size.shape]
    model = synthetic.counting_model(shape, section.device, torch.bfloat16)
    a_token = floor.work_of(model).kv_bytes
    blocks = -(-(tokens + _BEFORE + _AFTER + 1) // BLOCK_TOKENS) * requests
    engine = Engine(
        model,
        synthetic.tokenizer(),
        eos_ids=frozenset(),
        context_tokens=tokens + 64,
        blocks=2 * blocks,
        block_tokens=BLOCK_TOKENS,
        host_blocks=blocks,
        drafter=NoDrafter(),
    )
    section.put(requests=requests, tokens_of_each=tokens, kv_gb=round(requests * tokens * a_token / 1e9, 3))
    for repetition in range(2):  # the first one pays for what is allocated
        for way in WAYS:
            if section.left_s < 5:
                section.put(stopped="time was short")
                return
            _preempt(section, engine, shape.vocabulary, way, counts=repetition == 1, a_token=a_token)
    section.put(done=True)


def _preempt(section: "Section", engine: Engine, vocabulary: int, way: str, *, counts: bool, a_token: int) -> None:
    requests, tokens = section.size.preempted
    texts = prompts(vocabulary, requests, tokens, _BEFORE + _AFTER)
    names = [f"{way}-{i}" for i in range(requests)]
    limits = Limits(_BEFORE + _AFTER, ignore_eos=True)
    outputs: dict[str, list[int]] = {name: [] for name in names}
    for name, text in zip(names, texts, strict=True):
        engine.admit(Admission(name, 1, text, len(text), Sampling(), limits, salt=f"{name} {counts}"))

    def until(tokens_each: int) -> float:
        """Seconds until each has so many tokens."""
        begun = perf_counter()
        while behind := [name for name in names if len(outputs[name]) < tokens_each]:
            for row in engine.step([Run(name, 0, _PREFILL) for name in behind], len(behind)).rows:
                outputs[row.request_id].extend(row.tokens)
        return perf_counter() - begun

    prefill_s = until(_BEFORE)
    _wait(section.device)
    begun = perf_counter()
    for name in names if way != "keep" else []:
        (engine.offload if way == "offload" else engine.drop)(name)
    _wait(section.device)
    away_s, freed = perf_counter() - begun, engine.free_blocks
    begun = perf_counter()
    back_s = until(_BEFORE + 1)
    step_s = until(_BEFORE + _AFTER) / (_AFTER - 1)
    for name, text in zip(names, texts, strict=True):
        if outputs[name] != [(text[-1] + 1 + i) % vocabulary for i in range(_BEFORE + _AFTER)]:
            section.wrong(f"{way}: the text of {name} changed")
        engine.forget(name)
    if counts:
        moved_gb = requests * tokens * a_token / 1e9 if way == "offload" else 0.0
        row = {
            "way": way,
            "prefill_ms": 1e3 * prefill_s,
            "away_ms": 1e3 * away_s,
            "back_ms": 1e3 * max(back_s - step_s, 0.0),  # over and above a step
            "step_ms": 1e3 * step_s,
            "free_blocks_meanwhile": freed,
        }
        if moved_gb:
            row |= {"away_gb_per_s": moved_gb / away_s, "back_gb_per_s": moved_gb / max(back_s - step_s, 1e-9)}
        section.add("rows", row)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
