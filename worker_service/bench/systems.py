"""Systems that run in this process: our engine, and `generate` of transformers. Other processes: peer.py."""

import itertools
from time import perf_counter
from typing import Any

import torch

from worker_service.bench.race import Answer, Batch, Rounds
from worker_service.engine.cost_model import CostModel
from worker_service.engine.engine import Engine
from worker_service.engine.types import Admission, Limits, Run, Sampling
from worker_service.engine.warm_up import measure

_PREFILL_TOKENS = 1024  # in a step: prompts are short, so each is prefilled at once
_names = itertools.count()


class Ours:
    """Our engine, with up to `draft_len` drafts a round. Answers share no KV of equal beginnings. Of a batch so many
    `waves` are answered one after the other: a place that falls vacant goes to the next prompt at once."""

    def __init__(self, engine: Engine, draft_len: int, *, waves: int = 1, ignore_eos: bool = True) -> None:
        self._engine, self._draft_len, self._waves, self._ignore_eos = engine, draft_len, waves, ignore_eos
        self._costs: dict[int, CostModel] = {}  # by batch size

    def answer(self, batch: Batch, max_tokens: int) -> Answer:
        engine, limits = self._engine, Limits(max_tokens, ignore_eos=self._ignore_eos)
        slots = len(batch) // self._waves
        costs = self._costs.get(slots)
        if costs is None:
            costs = self._costs[slots] = CostModel(*measure(engine, slots))
        engine.weigh_drafts(costs.passes)  # as a worker does
        begun = perf_counter()
        outputs: dict[str, list[int]] = {}
        for prompt in batch:
            name = str(next(_names))
            engine.admit(Admission(name, 0, prompt, len(prompt), Sampling(), limits, salt=name))
            outputs[name] = []
        runs = {name: Run(name, self._draft_len, _PREFILL_TOKENS) for name in outputs}
        rounds = Rounds()
        while runs:
            round_begun = perf_counter()
            result = engine.step(list(runs.values()), slots)
            other_s = perf_counter() - round_begun - result.draft_s - result.verify_s
            costs.observe(result)
            for row in result.rows:
                outputs[row.request_id].extend(row.tokens)
                if row.finish is not None:
                    del runs[row.request_id]
            if not result.ran:
                raise RuntimeError(f"the engine's memory is too small for {min(slots, len(runs))} requests")
            if not any(row.prefilled for row in result.rows):
                rounds += Rounds(
                    passes=1,
                    rows=sum(row.skipped is None for row in result.rows),
                    tokens=sum(len(row.tokens) for row in result.rows),
                    drafted=sum(row.drafted for row in result.rows),
                    branched=sum(row.branched for row in result.rows),
                    accepted=sum(row.accepted for row in result.rows),
                    draft_s=result.draft_s,
                    verify_s=result.verify_s,
                    other_s=other_s,
                )
        seconds = perf_counter() - begun
        for name in outputs:
            engine.forget(name)
        return Answer(list(outputs.values()), seconds, rounds)


class Generate:
    """transformers' `generate` on a batch that is padded on the left. `options`: how its drafts are made, if any."""

    def __init__(self, model: Any, **options: Any) -> None:
        """`model`: a causal LM in eval mode; its end-of-sequence ids are taken away."""
        model.generation_config.eos_token_id = None
        for name in ("temperature", "top_p", "top_k"):
            setattr(model.generation_config, name, None)  # else it warns that greedy decoding has no use for them
        self._model, self._options = model, options
        self._passes = 0
        model.register_forward_pre_hook(self._count)

    def answer(self, batch: Batch, max_tokens: int) -> Answer:
        device, longest = self._model.device, max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in batch], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch], device=device)
        self._passes = 0
        begun = perf_counter()
        with torch.inference_mode():
            result = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, **self._options
            )
        outputs = result[:, longest:].tolist()  # waits for the device
        seconds = perf_counter() - begun
        rows = self._passes * len(batch)
        return Answer(outputs, seconds, Rounds(self._passes, rows, tokens=sum(map(len, outputs))))

    def _count(self, *_: Any) -> None:
        self._passes += 1
