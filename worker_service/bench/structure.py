"""`OMP_WAIT_POLICY=passive python -m worker_service.bench.structure`: what structured output costs of a step, on one
model, alone and in a batch of 8. `laps-sd up` runs workers with that setting, too. It serves nobody."""

import argparse
import json
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from time import perf_counter, process_time, thread_time
from typing import Any

import torch

from protos.structure import grammar
from protos.v1.types_pb2 import Structure
from worker_service.drafters import make_drafter
from worker_service.engine import hooks
from worker_service.engine.engine import Engine
from worker_service.engine.matcher import Matcher
from worker_service.engine.structure import Structures
from worker_service.engine.types import Admission, Limits, Run, Sampling
from worker_service.models import load
from worker_service.pull import resolve

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "country": {"type": "string", "maxLength": 40},
        "inhabitants": {"type": "integer"},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "country", "inhabitants", "capital"],
    "additionalProperties": False,
}
ITEMS = {"type": "array", "items": SCHEMA, "minItems": 8, "maxItems": 8}
SLOTS, DRAFTS, BLOCKS, BLOCK_TOKENS = 8, 4, 256, 64


class Stopwatch:
    """Seconds that threads spend in some functions, those nested in one another once; their CPU seconds by name."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.cpu_seconds: defaultdict[str, float] = defaultdict(float)
        self._inside = threading.local()

    def watch(self, owner: Any, name: str, *, waits: bool = True) -> None:
        """`waits`: whether the model's thread waits for it."""
        function: Callable[..., Any] = getattr(owner, name)

        @wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            if getattr(self._inside, "now", False):
                return function(*args, **options)
            self._inside.now, begun, cpu = True, perf_counter(), thread_time()
            try:
                return function(*args, **options)
            finally:
                self._inside.now = False
                self.seconds += waits * (perf_counter() - begun)
                self.cpu_seconds[name] += thread_time() - cpu

        setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    stopwatch = Stopwatch()
    for owner, name in [(Structures, "begin"), (Structures, "take")]:
        stopwatch.watch(owner, name)
    for name in ("forced", "prune", "push"):
        stopwatch.watch(Matcher, name)
    for name in ("follow_structure", "is_allowed"):
        stopwatch.watch(hooks, name)
    hooks.HOOKS = (hooks.follow_structure, *hooks.HOOKS[1:])
    stopwatch.watch(Matcher, "masks", waits=False)
    model = load(str(resolve(options.model)))
    engine = Engine(
        model.model,
        model.tokenizer,
        eos_ids=model.eos_ids,
        context_tokens=model.context_tokens,
        blocks=BLOCKS,
        block_tokens=BLOCK_TOKENS,
        drafter=make_drafter("default", model, blocks=BLOCKS, block_tokens=BLOCK_TOKENS),
        hooks=hooks.HOOKS,
    )
    messages = [{"role": "user", "content": "Describe eight cities as JSON."}]
    prompt = list(model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True).input_ids)
    for batch in (1, SLOTS):
        stopwatch.seconds = 0.0
        stopwatch.cpu_seconds.clear()
        print(json.dumps({"batch": batch} | _run(engine, prompt, batch, stopwatch)))  # noqa: T201


def _run(engine: Engine, prompt: list[int], batch: int, stopwatch: Stopwatch) -> dict[str, Any]:
    names = [f"{batch}-{i}" for i in range(batch)]
    form = grammar(Structure(json_schema=json.dumps(ITEMS)))
    for seed, name in enumerate(names):
        own = Sampling(temperature=1.0, seed=seed, grammar=form)
        engine.admit(Admission(name, 0, prompt, len(prompt), own, Limits(max_tokens=160)))
    seconds: list[float] = []
    tokens = drafted = accepted = 0
    cpu_begun = process_time()
    while any(engine.runnable(Run(name, DRAFTS, len(prompt))) for name in names):
        begun = perf_counter()
        rows = engine.step([Run(name, DRAFTS, len(prompt)) for name in names], batch).rows
        seconds.append(perf_counter() - begun)
        tokens += sum(len(row.tokens) for row in rows)
        drafted += sum(row.drafted for row in rows)
        accepted += sum(row.accepted for row in rows)
    cpu_s = process_time() - cpu_begun
    for name in names:
        engine.forget(name)
    return {
        "steps": len(seconds),
        "step_ms": round(1000 * sum(seconds) / len(seconds), 2),
        "structure_ms": round(1000 * stopwatch.seconds / len(seconds), 3),
        "structure_percent": round(100 * stopwatch.seconds / sum(seconds), 2),
        "structure_cpu_percent": round(100 * sum(stopwatch.cpu_seconds.values()) / cpu_s, 2),
        "cpu_ms": {name: round(1000 * s / len(seconds), 3) for name, s in stopwatch.cpu_seconds.items()},
        "tokens": tokens,
        "acceptance": round(accepted / max(drafted, 1), 2),
        "tokens_per_step": round(tokens / len(seconds) / batch, 2),
    }


if __name__ == "__main__":
    main()
