"""A scheduler's cost a step, on the toy executor: vLLM's own beside ours watching and ordering, in turn, so that a
busy machine slows all of them. `python -m tests.vllm.cost [ROUNDS]` tells microseconds of processor, and what is ours.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.vllm.drive import add, step
from tests.vllm.play import DIRECTED, Way, toy_core

RUNNING = (1, 8, 16, 64)
KINDS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "stock": (None, {}),
    "without a wish": (DIRECTED, {}),
    "observe": ("laps_sd_vllm.LapsSdScheduler", {"mode": "observe"}),
    "order": ("laps_sd_vllm.LapsSdScheduler", {"mode": "order"}),
}
OURS = ("_prepare", "_scheduled", "_before_output", "_report", "_verify")
TOKENS = 120


def engines(slots: int) -> dict[str, Any]:
    cores = {}
    for kind, (scheduler, asked) in KINDS.items():
        given = {"learned": False, "compare": False, **asked}
        cores[kind] = toy_core(
            Way(False, False, 4, 2000), scheduler, max_num_seqs=slots, max_num_batched_tokens=2048,
            additional_config={"laps_sd": given} if asked else {},
        )  # fmt: skip
    return cores


def timed(spent: list[float], whole: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        try:
            return whole(*args, **kwargs)
        finally:
            spent[0] += time.thread_time() - began

    return call


def run(core: Any, running: int, number: int, waiting: int) -> tuple[float, float]:
    """Microseconds a step: of schedule() and update_from_output() in all, and of what is ours in them."""
    scheduler, all_of_it, ours = core.scheduler, [0.0], [0.0]
    kind = type(scheduler)
    own = [name for name in OURS if hasattr(kind, name)]
    scheduler.schedule = timed(all_of_it, kind.schedule.__get__(scheduler))
    scheduler.update_from_output = timed(all_of_it, kind.update_from_output.__get__(scheduler))
    for name in own:
        setattr(scheduler, name, timed(ours, getattr(kind, name).__get__(scheduler)))
    rng = random.Random(number)
    for each in range(running + waiting):
        prompt = [600 + rng.randrange(300) for _ in range(20)]
        add(core, f"cost{number}-{each}", prompt, rng.randint(TOKENS // 2, TOKENS))
    steps = 0
    while scheduler.has_requests():
        step(core)
        steps += 1
    for name in ("schedule", "update_from_output", *own):
        delattr(scheduler, name)
    return 1e6 * all_of_it[0] / steps, 1e6 * ours[0] / steps


def main(rounds: int) -> None:
    number = 0
    for running in RUNNING:
        cores = engines(running)
        told: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for turn in range(rounds):
            for kind in list(KINDS) if turn % 2 else list(KINDS)[::-1]:
                number += 1
                told[kind].append(run(cores[kind], running, turn, running // 2))
        for kind, each in told.items():
            whole, ours = (statistics.median(part) for part in zip(*each[1:], strict=True))
            print(f"{running:3} running, {kind:15} {whole:7.0f} us a step, of it ours {ours:6.0f}")
        for core in cores.values():
            core.scheduler.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
