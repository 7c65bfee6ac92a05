"""`python -m tests.worker.apart_bench`: what a drafter elsewhere costs and gives, beside lookup alone, in turn.

The drafter knows the texts, and is right as often as it is told to be; it is another process on this machine, and its
link a third one. Ratios are of neighbouring runs: each with the mean of the lookup runs before and after it.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import mean, median, quantiles
from time import perf_counter, process_time
from typing import Any, NamedTuple

from tests.worker.attached import NOBODY, attached, process
from worker_service.drafters import behind_lookup
from worker_service.engine.drafting.drafter import Ask, Drafter, NoDrafter, Verified
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.drafting.remote_drafter import RemoteDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.types import Admission, Limits, Run, Sampling
from worker_service.models import load
from worker_service.pull import find

PROMPTS = "worker_service/bench/prompts.jsonl"
DRAFTERS: dict[str, dict[str, Any] | None] = {
    "honest": {},
    "slow (50 ms)": {"delay_s": 0.05},
    "slow (1 s)": {"delay_s": 1.0},
    "lying": {"mode": "random ids"},
    "late": {"mode": "late"},
    "flooding": {"mode": "flood"},
    "silent": {"mode": "silent"},
    "dead": None,  # nobody listens
}


class Switch(Drafter):
    """The engine's drafter: now this one, now that."""

    now: Drafter = NoDrafter()

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        drafts = self.now.propose(asks)
        self.waited_s = self.now.waited_s
        return drafts

    def expect(self, ask: Ask) -> None:
        self.now.expect(ask)

    def verified(self, rounds: Sequence[Verified]) -> None:
        self.now.verified(rounds)

    def forget(self, request_id: str) -> None:
        self.now.forget(request_id)


class Idle(RemoteDrafter):
    """Tells all and hears all, and proposes nothing: the cost of the link alone."""

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        self._read(0.0)
        return [[] for _ in asks]


class Ran(NamedTuple):
    tokens_per_s: float
    cpu_s_per_token: float
    verify_s: float  # of the median step
    longest: float  # wait before a pass, in median steps
    waited: float  # share of the time
    texts: list[list[int]]


def run(engine: Engine, drafter: Drafter, prompts: Sequence[list[int]], tokens: int, draft_len: int) -> Ran:
    engine.drafter._drafter.now = drafter  # type: ignore[attr-defined]
    names = [f"r{i}" for i in range(len(prompts))]
    texts: dict[str, list[int]] = {name: [] for name in names}
    for name, prompt in zip(names, prompts, strict=True):
        salt = f"{name}{perf_counter()}"  # no KV of an earlier run
        engine.admit(Admission(name, 0, prompt, len(prompt), Sampling(), Limits(tokens, ignore_eos=True), salt=salt))
    live, steps = list(names), []
    while any(row.num_uncomputed for row in engine.held()):
        for row in engine.step([Run(name, 0, 1024) for name in live], len(live)).rows:
            texts[row.request_id] += row.tokens
    begun, cpu = perf_counter(), process_time()
    while live:
        step_begun = perf_counter()
        result = engine.step([Run(name, draft_len, 1024) for name in live], len(live))
        steps.append((perf_counter() - step_begun, result.verify_s, result.wait_s, len(live)))
        for row in result.rows:
            texts[row.request_id] += row.tokens
        live = [row.request_id for row in result.rows if row.finish is None]
    took_s, cpu_s = perf_counter() - begun, process_time() - cpu
    for name in names:
        engine.forget(name)
    full = [step for step in steps if step[3] == len(names)]
    emitted = tokens * len(names)
    return Ran(
        emitted / took_s,
        cpu_s / emitted,
        median(step[1] for step in full),
        max(step[2] for step in steps) / median(step[0] for step in full),
        sum(step[2] for step in steps) / took_s,
        list(texts.values()),
    )


@contextmanager
def apart(
    kind: type[RemoteDrafter], script: dict[str, Any] | None, texts: Sequence[list[int]]
) -> Iterator[RemoteDrafter]:
    """The drafter of the engine, attached to a scripted one in a process; None: to nobody."""
    with ExitStack() as stack:
        address = NOBODY
        if script is not None:
            address, _ = stack.enter_context(process("tests.worker.apart", {"port": 0, **script}, texts))
        yield stack.enter_context(attached(address, kind))


def told(name: str, ratios: Sequence[float]) -> str:
    low, _, high = quantiles(ratios, n=4)
    return f"{name} {median(ratios):.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--draft-len", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--right", type=float, default=0.7)
    parser.add_argument("--drafters", nargs="*", default=list(DRAFTERS))
    asked = parser.parse_args()
    loaded = load(str(find(asked.model)), "cpu", "auto")
    with open(PROMPTS, encoding="utf-8") as file:
        lines = [json.loads(line)["prompt"] for line in file][: asked.batch]
    prompts = [list(loaded.tokenizer(line).input_ids) for line in lines]
    engine = Engine(
        loaded.model,
        loaded.tokenizer,
        eos_ids=loaded.eos_ids,
        context_tokens=min(2048, loaded.context_tokens),
        blocks=200,
        drafter=Switch(),
    )
    engine.bind_thread(1)

    def once(drafter: Drafter) -> Ran:
        return run(engine, drafter, prompts, asked.tokens, asked.draft_len)

    plain = once(NoDrafter())
    whole = [prompt + text for prompt, text in zip(prompts, plain.texts, strict=True)]

    for name in ["the link alone", *asked.drafters]:
        script = {} if name == "the link alone" else DRAFTERS[name]
        kind = Idle if name == "the link alone" else RemoteDrafter
        with apart(kind, script and {"right": asked.right, **script} if script is not None else None, whole) as remote:
            once(NgramDrafter())
            before, figures = once(NgramDrafter()), []
            for _ in range(asked.repetitions):
                ran = once(behind_lookup(remote))
                after = once(NgramDrafter())
                lookup = [mean(pair) for pair in zip(before[:3], after[:3], strict=True)]
                figures.append((*(ran[i] / lookup[i] for i in range(3)), ran.longest, ran.waited))
                assert ran.texts == after.texts == before.texts
                before = after
        speed, cpu, verify, longest, waited = zip(*figures, strict=True)
        sys.stdout.write(
            f"{name:15} {told('tokens/s', speed)}  {told('CPU a token', cpu)}  {told('pass', verify)}  "
            f"longest wait {max(longest):.2f} steps  waited {mean(waited):.1%}  "
            f"right {remote.accepted} of {remote.drafted}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
