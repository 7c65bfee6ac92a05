"""A model over several stages in this process: what goes between them is what sockets would carry, and nothing else."""

import json
from pathlib import Path
from typing import Any

from worker_service.engine.drafting.drafter import Drafter
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.stages import Call, Stage, StagedTarget
from worker_service.engine.types import Place
from worker_service.models import load


class LocalRing:
    """Passes calls on at once."""

    def __init__(self, stages: list[Stage]) -> None:
        self.stages, self.calls, self._answers = stages, 0, list[Call]()

    def target(self, model: Any) -> StagedTarget:
        return StagedTarget(model, self)

    def call(self, call: Call) -> None:
        self.calls += 1
        for stage in self.stages:
            if (onward := stage.take(_carried(call))) is None:
                return
            call = onward
        self._answers.append(_carried(call))

    def answer(self) -> Call:
        return self._answers.pop(0)


def _carried(call: Call) -> Call:
    name, arguments = json.loads(json.dumps((call.name, call.arguments), default=list))
    return Call(name, arguments, bytearray(call.body))


def staged_engine(
    folder: Path, size: int, dtype: str = "float32", drafter: Drafter | None = None, **options: Any
) -> Engine:
    """The engine of the first of `size` stages; with 1 that of a whole model."""
    models = [load(str(folder), "cpu", dtype, place=Place(number, size)) for number in range(size)]
    ring = LocalRing([Stage(models[number].model, last=number == size - 1) for number in range(1, size)])
    defaults: dict[str, Any] = {"context_tokens": 512, "blocks": 48, "block_tokens": 16}
    return Engine(
        models[0].model,
        models[0].tokenizer,
        eos_ids=models[0].eos_ids,
        drafter=drafter or NgramDrafter(),
        group=ring if size > 1 else None,
        **(defaults | options),
    )
