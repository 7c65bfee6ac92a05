"""What the worker's tests share: the tiny model as a reference, engines on it, and who plays the scheduler for them."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.types import Admission, Finish, Limits, Row, Run, Sampling

CLEAR = 1e-3  # where the reference's two best logits are closer, float32 sums of another shape may choose the other


def greedy_differences(reference: Any, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """Positions at which `reference`, given the same text before, clearly prefers another token."""
    with torch.inference_mode():
        tokens = torch.tensor([[*prompt, *output]])
        logits = reference(tokens, logits_to_keep=len(output) + 1).logits[0, :-1]
    best = logits.topk(2).values
    clear = (best[:, 0] - best[:, 1] > CLEAR).tolist()
    chosen = logits.argmax(-1).tolist()
    return [i for i, token in enumerate(output) if clear[i] and chosen[i] != token]


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
    preempted: Counter[str] = field(default_factory=Counter)  # by what became of the KV: keep, offload, drop

    def admit(self, request_id: str, prompt: list[int], limits: Limits, sampling: Sampling | None = None) -> None:
        self.admitted[request_id] = (prompt, sampling or Sampling(), limits)
        self.outputs[request_id] = []
        self.readmit(request_id, 0)

    def readmit(self, request_id: str, output_tokens: int, placement: int = 1) -> None:
        """Admit with the first `output_tokens` of its output: the rest never became durable."""
        prompt, sampling, limits = self.admitted[request_id]
        output = self.outputs[request_id] = self.outputs[request_id][:output_tokens]
        self.finished.pop(request_id, None)
        self.engine.admit(Admission(request_id, placement, [*prompt, *output], len(prompt), sampling, limits))

    def step(self, runs: Iterable[Run], slots: int = 64) -> list[Row]:
        rows = list(self.engine.step(list(runs), slots).rows)
        for row in rows:
            assert row.start == len(self.outputs[row.request_id])
            self.outputs[row.request_id].extend(row.tokens)
            if row.finish:
                self.finished[row.request_id] = row.finish
        self.rows.extend(rows)
        return rows

    @property
    def live(self) -> list[str]:
        return [name for name in self.admitted if name not in self.finished]

    def disturb(self, random: Random, actions: int, slots: int) -> None:
        """Rounds of changing rankings, draft lengths 0 to 8 and prefill chunks; between them requests lose their KV,
        to the host's memory or for good, or are admitted again with less of their output."""
        ran: set[str] = set()
        for _ in range(actions):
            if not (live := self.live):
                return
            name = random.choice(live)
            match random.choice(["step"] * 7 + ["offload", "drop", "replay"]):
                case "step":
                    order = random.sample(live, random.randint(1, len(live)))
                    runs = [Run(name, random.randint(0, 8), random.choice([0, 3, 16, 256])) for name in order]
                    rows = {row.request_id for row in self.step(runs, slots) if row.skipped is None}
                    self.preempted["keep"] += sum(1 for name in ran & set(self.live) if name not in rows)
                    ran = rows
                case "offload":
                    self.engine.offload(name)
                    self.preempted["offload"] += self.engine._requests[name].saved is not None
                    ran -= {name}
                case "drop":
                    self.preempted["drop"] += self.engine._requests[name].kv.length > 0
                    self.engine.drop(name)
                    ran -= {name}
                case "replay":
                    self.readmit(name, random.randint(0, len(self.outputs[name])), placement=2)

    def finish_in_little_memory(self) -> None:
        """As the scheduler would: where nobody can go on, all but the first give up their KV."""
        for _ in range(5000):
            if not (live := self.live):
                return
            rows = self.step(Run(name, 3, 64) for name in live)
            if all(row.skipped for row in rows):
                for name in live[1:]:
                    self.engine.offload(name)
        raise AssertionError(f"never finished: {self.live}")

    def forget_all(self) -> None:
        for name in self.admitted:
            self.engine.forget(name)
        assert self.engine.free_blocks == self.engine.blocks

    def finish_all(self, draft_len: Callable[[int], int] = lambda round_: 4, prefill_tokens: int = 16) -> None:
        for round_ in range(5000):
            if not (live := self.live):
                return
            self.step(Run(request_id, draft_len(round_ + i), prefill_tokens) for i, request_id in enumerate(live))
        raise AssertionError(f"never finished: {live}")
