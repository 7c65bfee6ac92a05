"""Recorded answers served again, in vLLM's own order and in ours: vLLM's engine, scheduler and memory on the toy
executor, answers as long as the real model's, drafts accepted as they were, and a clock that each step moves by what
such a step costs (`--in-steps`: by one). So a change of the order is judged on a busy machine, over several draws.
Beside it stands what no order can beat by much: vLLM's own where all requests have room at once.

`python -m tests.vllm.replay` in vLLM's environment. `--set max_pause_s=1` tries another setting of the policy,
`--known exact` tells it all lengths, `--no-foresight` begins requests for whom memory will run out. Nothing of it is
kept.
"""

import argparse
import random
import sys
import tempfile
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from typing import Any, ClassVar

from vllm import envs

from laps_sd_vllm import plugin
from tests.vllm.answers import MOST, MOST_PROMPT, Answer, drawn, lessons
from tests.vllm.in_steps import Asked, Clock, Run, figures, in_virtual_time, serve
from tests.vllm.play import Way, toy_core
from tests.vllm.toy import NEVER, Ending, following

BLOCK, CONTEXT, ROWS, DRAFTS = 32, 1024, 64, 4
LONGEST = -(-(MOST_PROMPT + MOST) // BLOCK)  # blocks of a request
CELLS = {f"{slots} slots": (slots, ROWS * LONGEST + 1) for slots in (2, 4, 8, 16)}
ROOM_FOR_ALL = "room for all"
CELLS |= {ROOM_FOR_ALL: (ROWS, ROWS * LONGEST + 1)}
CELLS |= {f"KV of {times} long requests": (ROWS, times * LONGEST + 1) for times in (4, 6, 8)}
COSTS = 0.02, 0.0004  # seconds of a step and of a token in it: about this model's on one core


class Recorded(Ending):
    """`rounds`: as recorded, by request. Where a request lost its drafts, it goes on without any until it is where a
    recorded round begins. `again`: tokens that were computed before."""

    rounds: ClassVar[dict[str, dict[int, tuple[int, int]]]] = {}

    def _init_executor(self) -> None:
        super()._init_executor()
        self.prompts: dict[str, int] = {}
        self.reached: dict[str, int] = {}
        self.again = 0

    def _learn(self, step: Any) -> None:
        for new in step.scheduled_new_reqs:
            self.prompts.setdefault(new.req_id, len(new.prompt_token_ids))
        super()._learn(step)

    def _compute(self, id: str, count: int, step: Any) -> list[int]:
        known = self.known[id]
        own = known.computed + count - len(step.scheduled_spec_decode_tokens.get(id, []))
        reached = self.reached.get(id, 0)
        self.again += max(0, min(reached, own) - known.computed)
        emitted = super()._compute(id, count, step)
        self.reached[id] = max(reached, known.computed)
        if emitted:
            drafted, accepted = self.rounds[id].get(len(known.tokens) - self.prompts[id], (0, 0))
            text = list(known.tokens[-3:])
            for _ in range(accepted):
                text.append(following(text))
            known.drafts = text[3:] + [NEVER] * (drafted - accepted)
        return emitted


@dataclass(frozen=True)
class Order:
    """`settings`: of LAPS-SD; None: vLLM's own order. `exact`: lengths are told, and nothing is learned. `foresight`:
    nobody begins for whom memory is believed to run out."""

    settings: dict[str, Any] | None = None
    exact: bool = False
    foresight: bool = True


@dataclass(frozen=True)
class Replay:
    """`costs`: of a step, and of a token in it. `folder`: of what is learned."""

    cell: str
    costs: tuple[float, float]
    folder: Path

    def serve(self, order: Order, draws: list[Answer], at: list[float], learned: Path | None = None) -> tuple[Run, int]:
        """And the tokens that were computed more than once. `at`: in the unit of the costs. `learned`: a file, which
        the lessons of this run are added to."""
        seqs, blocks = CELLS[self.cell]
        clock = Clock(1.0, *self.costs)
        asked = [
            Asked(f"r{number}", _prompt(each, number), each.tokens, each.most, each.tokens if order.exact else None)
            for number, each in enumerate(draws)
        ]
        Recorded.rounds = {one.id: each.rounds for one, each in zip(asked, draws, strict=True)}
        given = {"mode": "order", "compare": False, "predictor": "none" if order.exact else "online"}
        given |= {"learned": str(learned) if learned else False}
        with in_virtual_time(clock):
            core = toy_core(
                Way(False, False, DRAFTS, blocks),
                None if order.settings is None else plugin.__package__ + ".LapsSdScheduler", Recorded,
                block_size=BLOCK, max_num_seqs=seqs, max_model_len=CONTEXT, max_num_batched_tokens=2048,
                additional_config={} if order.settings is None else {"laps_sd": given | order.settings},
            )  # fmt: skip
            if order.settings is not None:
                core.scheduler.advice.ordering.core.fleet.foresight = order.foresight
            run = serve(core, clock, asked, at)
            core.scheduler.shutdown()
        return run, core.model_executor.again

    def learned(self, order: Order) -> Path:
        """Of a burst of other requests."""
        file = self.folder / "lessons"
        file.unlink(missing_ok=True)
        draws = lessons()
        self.serve(order, draws, [0.0] * len(draws), file)
        return file

    def rate(self, draws: list[Answer]) -> float:
        """Requests a unit of time that vLLM's own order makes of these at saturation."""
        burst, _ = self.serve(Order(), draws, [0.0] * len(draws))
        return burst.waiting * len(draws) / fsum(each.tokens for each in draws)


def _prompt(answer: Answer, number: int) -> list[int]:
    """As long as it was: its kind, and tokens that no other request has, so that none shares their KV."""
    rng = random.Random(number)
    kind = 600 + sorted({each.kind for each in lessons()}).index(answer.kind)
    return [kind] * 4 + [610 + rng.randrange(390) for _ in range(answer.prompt - 4)]


def compared(replay: Replay, ours: Order, load: float, seed: int, count: int) -> dict[str, float]:
    """Both orders on the same requests at the same times. Ratios are ours over vLLM's own."""
    draws, rng, at = drawn(count, seed), random.Random(seed), [0.0]
    rate = load * replay.rate(draws)
    while len(at) < count:
        at.append(at[-1] + rng.expovariate(rate))
    stock, stock_again = replay.serve(Order(), draws, at)
    mine, again = replay.serve(ours, draws, at, None if ours.exact else replay.learned(ours))
    theirs = figures(stock.served)
    free, _ = replace(replay, cell=ROOM_FOR_ALL).serve(Order(), draws, at)
    row = {"waited": stock.waited, "stock": theirs["mean"], "room": figures(free.served)["mean"] / theirs["mean"]}
    row |= {name: value / max(theirs[name], replay.costs[0]) for name, value in figures(mine.served).items()}
    tokens = fsum(each.prompt + each.tokens for each in draws)
    return row | {"again": again / tokens, "stock again": stock_again / tokens}


COLUMNS = ("mean", "p99", "p99 first token", "p99 longest pause")


def line(name: str, load: float, rows: list[dict[str, float]]) -> str:
    """`waited`: how much of the time somebody waits in vLLM's own order."""
    means = {column: fsum(row[column] for row in rows) / len(rows) for column in rows[0]}
    each = ", ".join(f"{row['mean']:.2f}" for row in rows)
    ratios = "|".join(f"{means[column]:.2f}" for column in COLUMNS)
    again = f"{100 * means['stock again']:.0f} / {100 * means['again']:.0f}"
    return (
        f"|{name}|{load}|{100 * means['waited']:.0f}|{means['stock']:.2f}|{ratios}|{each}|{again}|{means['room']:.2f}|"
    )


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="recorded answers served again, in vLLM's own order and in ours")
    cells = [name for name in CELLS if name != ROOM_FOR_ALL]
    parser.add_argument("--cells", nargs="+", choices=cells, default=["4 slots", "KV of 4 long requests"])
    parser.add_argument("--loads", nargs="+", type=float, default=[0.9, 1.0, 1.1])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of the policy")
    parser.add_argument("--policy", default="default")
    parser.add_argument("--known", choices=["learned", "exact"], default="learned", help="of lengths")
    parser.add_argument("--foresight", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--costs", nargs=2, type=float, default=COSTS, metavar="S", help="of a step, of a token in it")
    parser.add_argument("--in-steps", action="store_true", help="a step takes one, however much it computes")
    given = parser.parse_args(words)
    ours = Order({"policy": given.policy, "policy_set": given.set}, given.known == "exact", given.foresight)
    envs.VLLM_CACHE_ROOT = tempfile.mkdtemp()
    heads = ["queue", "load", "somebody waits %", "vLLM's mean", *COLUMNS, "means by draw", "again %", "room for all"]
    print(f"|{'|'.join(heads)}|\n{'|---' * len(heads)}|")
    for cell in given.cells:
        replay = Replay(cell, (1.0, 0.0) if given.in_steps else tuple(given.costs), Path(envs.VLLM_CACHE_ROOT))
        for load in given.loads:
            print(
                line(cell, load, [compared(replay, ours, load, seed, given.requests) for seed in given.seeds]),
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
