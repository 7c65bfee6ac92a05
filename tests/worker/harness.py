"""What the worker's tests share: the tiny model as a reference, engines on it, and who plays the scheduler for them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from worker_service.engine.draft import NgramDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.types import Finish, Limits, Row, Run, Sampling


@dataclass
class Tiny:
    """The tiny model as transformers has it: the reference."""

    folder: Path
    model: Any
    tokenizer: Any

    @property
    def eos(self) -> int:
        return int(self.tokenizer.eos_token_id)

    def prompt(self, text: str) -> list[int]:
        return list(self.tokenizer(text).input_ids)

    def engine(self, **options: Any) -> Engine:
        """An engine on a model of its own: the engine replaces the model's attention."""
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        defaults: dict[str, Any] = {
            "eos_ids": frozenset({self.eos}),
            "context_tokens": 1024,
            "blocks": 256,
            "block_tokens": 8,
            "drafter": NgramDrafter(),
        }
        return Engine(model, self.tokenizer, **(defaults | options))


@dataclass
class Driver:
    """Plays the scheduler for one engine: admits, runs rounds, collects rows."""

    engine: Engine
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, Finish] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    admitted: dict[str, tuple[list[int], Sampling, Limits]] = field(default_factory=dict)

    def admit(self, request_id: str, prompt: list[int], limits: Limits, sampling: Sampling | None = None) -> None:
        self.admitted[request_id] = (prompt, sampling or Sampling(), limits)
        self.outputs[request_id] = []
        self.readmit(request_id, 0)

    def readmit(self, request_id: str, output_tokens: int, placement: int = 1) -> None:
        """Admit with the first `output_tokens` of its output: the rest never became durable."""
        prompt, sampling, limits = self.admitted[request_id]
        output = self.outputs[request_id] = self.outputs[request_id][:output_tokens]
        self.finished.pop(request_id, None)
        self.engine.admit(request_id, placement, [*prompt, *output], len(prompt), sampling, limits)

    def step(self, runs: Iterable[Run], slots: int = 64) -> list[Row]:
        rows = list(self.engine.step(list(runs), slots).rows)
        for row in rows:
            assert row.start == len(self.outputs[row.request_id])
            self.outputs[row.request_id].extend(row.tokens)
            if row.finish:
                self.finished[row.request_id] = row.finish
        self.rows.extend(rows)
        return rows

    def finish_all(self, draft_len: Callable[[int], int] = lambda round_: 4, prefill_tokens: int = 16) -> None:
        for round_ in range(5000):
            live = [request_id for request_id in self.admitted if request_id not in self.finished]
            if not live:
                return
            self.step(Run(request_id, draft_len(round_ + i), prefill_tokens) for i, request_id in enumerate(live))
        raise AssertionError(f"never finished: {live}")
