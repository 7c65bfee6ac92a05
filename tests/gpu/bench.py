"""How fast the engine is at a real model's size, beside the floor that memory and arithmetic allow. The weights are
random and made on the device; the text counts upwards, so every token is known (worker_service/bench/synthetic.py)."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from random import Random
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from tests.gpu import exactness
from tests.gpu.repeated import Repeated
from worker_service.bench import floor, synthetic
from worker_service.bench.race import Answer, Rounds
from worker_service.bench.record import PLAIN, Heat, figures
from worker_service.bench.systems import Ours
from worker_service.engine.drafting.drafter import Drafter, NoDrafter
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.graphs import Graphs

if TYPE_CHECKING:
    from tests.gpu.sections import Section

BLOCK_TOKENS, MAX_DRAFT, _DRAFTS = 64, 8, 4
_ACCEPTANCE = 0.7
_WARM_UP_TOKENS = 4


def check_graphs(section: "Section") -> None:
    """The same with passes as CUDA graphs, after their texts were looked at."""
    if section.device.type == "cpu":
        Graphs.kind = Repeated  # all but the recording can be tried there
    exactness.check_graphs(section)
    check(section, "graphs")


def check(section: "Section", attention: str = "auto") -> None:
    """`attention`: as the engine's."""
    size, shape = section.size, synthetic.SHAPES[section.size.shape]
    dtype = torch.bfloat16
    begun = perf_counter()
    model = synthetic.counting_model(shape, section.device, dtype)
    work, machine = floor.work_of(model), floor.measure(section.device, dtype)
    section.put(
        shape=size.shape,
        dtype="bfloat16",
        weights_gb=round(work.weight_bytes / 1e9, 2),
        made_in_s=round(perf_counter() - begun, 1),
        machine=asdict(machine),
    )
    longest = size.long_prompt_tokens + size.tokens
    blocks = max(size.batches) * _blocks(size.prompt_tokens + size.tokens) + _blocks(longest)
    begun = perf_counter()
    engine = Engine(
        model,
        synthetic.tokenizer(),
        eos_ids=frozenset(),
        context_tokens=longest,
        blocks=blocks,
        block_tokens=BLOCK_TOKENS,
        max_draft=MAX_DRAFT,
        drafter=NoDrafter(),
        attention=attention,
    )
    section.put(
        engine_in_s=round(perf_counter() - begun, 1), kv_gb=round(blocks * BLOCK_TOKENS * work.kv_bytes / 1e9, 2)
    )
    drafters: dict[str, tuple[Drafter, int]] = {
        PLAIN: (NoDrafter(), 0),
        "ours": (synthetic.OracleDrafter(shape.vocabulary, _ACCEPTANCE), _DRAFTS),
        "ours-ngram": (NgramDrafter(), _DRAFTS),
    }
    # Alone and the largest batch first: a run that is cut short has both ends.
    order = [size.batches[0], size.batches[-1], *size.batches[1:-1]]
    for batch in dict.fromkeys(order):
        texts = prompts(shape.vocabulary, batch, size.prompt_tokens, size.tokens)
        answers: dict[str, list[Answer]] = {}
        for name, (drafter, drafts) in drafters.items():
            if section.left_s < 5:
                section.put(stopped=f"time was short at batch {batch}")
                return
            engine.drafter, ours = drafter, Ours(engine, drafts)
            ours.answer(texts, _WARM_UP_TOKENS)
            answers[name] = [_timed(section, ours, texts, size.tokens, shape.vocabulary, f"{name} at batch {batch}")]
            rows = figures([Heat(batch, drafts, [texts], 1, {name: answers[name]})], machine, work)["rows"]
            section.add("rows", rows[0] | {"draft_len": drafts, "peak_gb": _peak(section.device)})
    _mixed(section, engine, machine, work, shape.vocabulary)
    _outside(section, engine, shape.vocabulary)
    if attention == "graphs":
        exactness.check_recorded(section, engine)
    section.put(done=True)


def _blocks(tokens: int) -> int:
    return -(-(tokens + MAX_DRAFT + 1) // BLOCK_TOKENS)


def prompts(vocabulary: int, count: int, tokens: int, answer: int) -> list[list[int]]:
    """Numbers that count upwards, in two runs: the answer, which goes on from the second, repeats the first."""
    chance, half = Random(0), tokens // 2
    starts = [chance.randrange(vocabulary - tokens - 2 * answer) for _ in range(count)]
    return [[*range(s + half - 2, s + tokens - 2), *range(s, s + half)] for s in starts]


def _timed(
    section: "Section", ours: Ours, texts: Sequence[Sequence[int]], tokens: int, vocabulary: int, what: str
) -> Answer:
    if section.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(section.device)
    answer = ours.answer(texts, tokens)
    expected = [[(text[-1] + 1 + i) % vocabulary for i in range(tokens)] for text in texts]
    if answer.outputs != expected:
        off = sum(own != other for own, other in zip(answer.outputs, expected, strict=True))
        section.wrong(f"{what}: {off} of {len(expected)} texts are not what the weights say")
    return answer


def _peak(device: torch.device) -> float | None:
    return round(torch.cuda.max_memory_allocated(device) / 1e9, 2) if device.type == "cuda" else None


def _mixed(section: "Section", engine: Engine, machine: floor.Machine, work: floor.Work, vocabulary: int) -> None:
    """One long text among short ones: what a batch pays for its longest member."""
    size = section.size
    batch = min(32, max(size.batches))
    texts = prompts(vocabulary, batch - 1, size.prompt_tokens, size.tokens)
    texts += prompts(vocabulary, 1, size.long_prompt_tokens, size.tokens)
    engine.drafter, ours = NoDrafter(), Ours(engine, 0)
    ours.answer(texts, _WARM_UP_TOKENS)
    answer = _timed(section, ours, texts, size.tokens, vocabulary, "one long text among short ones")
    context = sum(map(len, texts)) / batch + size.tokens / 2
    floor_s = floor.floor_s(machine, work, batch, batch, context)
    step_s = answer.rounds.seconds / max(answer.rounds.passes, 1)
    section.put(
        mixed={
            "batch": batch,
            "long_prompt_tokens": size.long_prompt_tokens,
            "step_ms": 1e3 * step_s,
            "floor_ms": 1e3 * floor_s,
            "step_over_floor": step_s / floor_s,
            "peak_gb": _peak(section.device),
        }
    )


def _outside(section: "Section", engine: Engine, vocabulary: int) -> None:
    """The cost of sampling: temperature and top_p for every request, at the largest batch."""
    from worker_service.engine.types import Admission, Limits, Run, Sampling

    size = section.size
    texts = prompts(vocabulary, max(size.batches), size.prompt_tokens, size.tokens)
    names = [f"sampled-{i}" for i in range(len(texts))]
    for name, text in zip(names, texts, strict=True):
        sampling = Sampling(temperature=0.8, top_p=0.9, seed=1)
        engine.admit(Admission(name, 1, text, len(text), sampling, Limits(size.tokens, ignore_eos=True), salt=name))
    rounds = Rounds()
    while ran := engine.step([Run(name, 0, 1024) for name in names], len(names)):
        if not ran.ran:
            break
        if not any(row.prefilled for row in ran.rows):
            rounds += Rounds(1, len(ran.rows), draft_s=ran.draft_s, verify_s=ran.verify_s, other_s=ran.other_s)
        if rounds.passes >= 16 or section.left_s < 3:
            break
    waits = _waits(section.device, lambda: engine.step([Run(name, 0, 0) for name in names], len(names)))
    for name in names:
        engine.forget(name)
    found: dict[str, Any] = {"batch": len(names), "passes": rounds.passes, "outside_share": rounds.outside_share}
    found["waits"] = waits
    section.put(sampled=found | {"step_ms": 1e3 * rounds.seconds / max(rounds.passes, 1)})


def _waits(device: torch.device, work: Callable[[], Any]) -> int | None:
    """How often `work` waits for the device, by torch's own account; None: there is no device to wait for."""
    if device.type != "cuda":
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(each.message) for each in said)
