"""`python -m tests.worker.apart_points`: two real processes beside the simulator, and how much of drafting is hidden.

A worker's engine on a tiny model whose passes are made as slow as those of a device of some use, and a drafter in
another process whose guesses are made up (drafting/knowing.py), with a delay on the way to it. The simulator is told
the same costs and guesses. Sleeps are most of the time, but a busy machine falsifies it all the same: the table says
how long passes took in the median, of what they should take.

`unhidden`: milliseconds from telling a text to the drafts for it, measured while the drafter guesses nothing beyond
them: the way there and back, the drafting, and all that messages cost. `hidden`: 1 - what rounds waited / that, where a
round that went on without drafts counts as if it had waited for all of it. `mean end`: of ready-first, how long
requests took in the mean, of what they take where nobody lets others go first.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from laps_sd.ports import claim_ports
from scheduler_service.sim.apart import tokens_per_s
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.drafter import Apart, fan_of
from scheduler_service.sim.worker import SimFleet
from tests.tiny_model import make_tiny_model
from tests.worker.attached import attached, process
from tests.worker.drafting.knowing import Known, job_of
from worker_service.engine.drafting.drafter import Drafter, NoDrafter
from worker_service.engine.drafting.remote_drafter import RemoteDrafter
from worker_service.engine.drafting.shielded import Shielded
from worker_service.engine.engine import Engine
from worker_service.engine.target import InputSequence, Passed, Target
from worker_service.engine.types import Admission, Limits, Run, Sampling
from worker_service.models import load

DRAFT_LEN = 4


@dataclass(frozen=True)
class Point:
    mode: str  # guesses or ready-first
    slots: int
    rtt_ms: float

    @property
    def requests(self) -> int:
        return self.slots * (2 if self.mode == "ready-first" else 1)


POINTS = [
    Point("guesses", 1, 1.0),
    Point("guesses", 1, 5.0),
    Point("guesses", 1, 10.0),
    Point("guesses", 1, 20.0),
    Point("guesses", 4, 5.0),
    Point("ready-first", 4, 5.0),
    Point("ready-first", 4, 20.0),
]


class SlowTarget:
    """`target`, but a pass takes what `costs` say, or longer where the machine does not get that done."""

    def __init__(self, target: Target, costs: StepCosts) -> None:
        self._target, self._costs = target, costs
        self.over: list[float] = []  # how much longer each took, as a ratio

    def forward(self, sequences: Sequence[InputSequence]) -> Passed:
        begun = time.perf_counter()
        passed = self._target.forward(sequences)
        should_s = self._costs.step_s(0, len(sequences), sum(len(one.tokens) for one in sequences), 0, 0)
        time.sleep(max(0.0, begun + should_s - time.perf_counter()))
        self.over.append((time.perf_counter() - begun) / should_s)
        return passed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


@dataclass(frozen=True)
class Ran:
    tokens_per_s: float
    waited_s: float  # for each request that ran, in the mean
    drafted: float  # share of rounds
    over: float  # a pass, beside what it should take
    mean_s: float  # until a request ended
    texts: list[list[int]]


def run(
    engine: Engine, drafter: Drafter, prompts: Sequence[Sequence[int]], tokens: int, slots: int, ready_first: bool
) -> Ran:
    """Answers all prompts, as many at once as there are slots. The prompts' own passes do not count."""
    engine.drafter = Shielded(drafter)
    engine._planner._late = engine.drafter.late
    target: SlowTarget = engine.target  # type: ignore[assignment]
    names = [f"r{number}" for number in range(len(prompts))]
    texts: dict[str, list[int]] = {name: [] for name in names}
    for name, prompt in zip(names, prompts, strict=True):
        limits, salt = Limits(tokens, ignore_eos=True), f"{name}{time.perf_counter()}"
        engine.admit(Admission(name, 0, list(prompt), len(prompt), Sampling(), limits, salt=salt))
    while any(row.num_uncomputed for row in engine.held()):
        for row in engine.step([Run(name, 0, 1024) for name in names], len(names)).rows:
            texts[row.request_id] += row.tokens
    target.over.clear()
    waited_s, drafted, live, rounds, ends_s = 0.0, 0, list(names), 0, list[float]()
    begun = time.perf_counter()
    while live:
        result = engine.step([Run(name, DRAFT_LEN, 1024, yields=ready_first) for name in live], slots)
        for row in result.ran:
            texts[row.request_id] += row.tokens
            rounds += 1
            drafted += bool(row.drafted)
            waited_s += result.wait_s
        over = {row.request_id for row in result.rows if row.finish is not None}
        ends_s += [time.perf_counter() - begun] * len(over)
        live = [name for name in live if name not in over]
    took_s = time.perf_counter() - begun
    for name in names:
        engine.forget(name)
    emitted = sum(map(len, texts.values())) - len(names)
    figures = emitted / took_s, waited_s / rounds, drafted / rounds, median(target.over), mean(ends_s)
    return Ran(*figures, list(texts.values()))


@contextmanager
def drafter_of(known: Known, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[RemoteDrafter]:
    """Attached to a process of drafting/knowing.py."""
    told = asdict(replace(known, port=claim_ports(0)[0]))
    del told["pairs"]
    with process("tests.worker.drafting.knowing", told, pairs) as (address, _), attached(address) as remote:
        yield remote


def unhidden_s(remote: RemoteDrafter, work: Callable[[], object]) -> float:
    """How long the drafts take for a text that was told, where the drafter had guessed none of them. It guesses nothing
    from here on."""
    assert remote._welcome is not None
    remote._welcome = remote._welcome._replace(longest_chain=DRAFT_LEN, widest_fan=0)
    work()
    assert remote._worth.delay_s is not None
    return remote._worth.delay_s


def simulated(point: Point, known: Known, costs: StepCosts, tokens: int) -> float:
    """Tokens a second over those of plain decoding."""
    jobs = [job_of(number, tokens, known.right, DRAFT_LEN) for number in range(point.requests)]
    ready = point.mode == "ready-first"
    guessing = not ready or point.rtt_ms >= costs.t_verify_ms
    fan = max(fan_of(known.supply_ms, known.chain_ms, point.slots, DRAFT_LEN), 1) if guessing else 0
    apart = Apart(point.rtt_ms, known.supply_ms, known.chain_ms, 64, fan, known.second, ready_first=ready)
    fleet = SimFleet(slots=point.slots, draft_len=DRAFT_LEN, costs=costs, apart=apart)
    return tokens_per_s(jobs, fleet) / tokens_per_s(jobs, replace(fleet, draft_len=0, apart=None))


@contextmanager
def slow_engine(costs: StepCosts) -> Iterator[Engine]:
    """On a tiny model whose passes take what `costs` say."""
    with tempfile.TemporaryDirectory() as folder:
        tiny = load(str(make_tiny_model(Path(folder) / "tiny")), "cpu", "float32")
        sizes = {"context_tokens": 1024, "blocks": 512, "block_tokens": 16}
        engine = Engine(tiny.model, tiny.tokenizer, eos_ids=frozenset(), drafter=NoDrafter(), **sizes)  # type: ignore[arg-type]
        engine.bind_thread(1)
        engine.target = SlowTarget(engine.target, costs)  # type: ignore[assignment]
        yield engine


def measured(engine: Engine, point: Point, costs: StepCosts, tokens: int, repetitions: int) -> dict[str, Any]:
    """In turn with plain decoding, whose texts they are."""
    prompts, ready = [[number, 7, 8, 9] for number in range(point.requests)], point.mode == "ready-first"

    def once(drafter: Drafter, ready_first: bool = False) -> Ran:
        return run(engine, drafter, prompts, tokens, point.slots, ready_first)

    before = once(NoDrafter())
    known = Known("", rtt_ms=point.rtt_ms, vocab_size=engine.vocab_size)
    ratios, runs, ends = [], [], []
    with drafter_of(known, list(zip(prompts, before.texts, strict=True))) as remote:
        for _ in range(repetitions):
            runs.append(once(remote, ready))
            after = once(NoDrafter())
            assert runs[-1].texts == after.texts == before.texts
            ratios.append(2 * runs[-1].tokens_per_s / (before.tokens_per_s + after.tokens_per_s))
            ends.append(runs[-1].mean_s / once(remote).mean_s if ready else 1.0)
            before = after
        unhidden_ms = 1e3 * unhidden_s(remote, lambda: once(remote))
    waited, drafted = 1e3 * mean(ran.waited_s for ran in runs) / unhidden_ms, mean(ran.drafted for ran in runs)
    x, model = median(ratios), simulated(point, known, costs, tokens)
    return (
        asdict(point)
        | {"measured": x, "least": min(ratios), "most": max(ratios), "simulated": model, "off": x / model - 1}
        | {"unhidden_ms": unhidden_ms, "waited": waited, "hidden": drafted - waited, "drafted": drafted}
        | {"pass_over": max(ran.over for ran in runs)}
        | ({"mean_end": median(ends)} if ready else {})
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pass-ms", type=float, default=60.0, help="of the target, with one token")
    parser.add_argument("--tokens", type=int, default=120, help="of each answer")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where the points go, too")
    asked = parser.parse_args()
    costs = StepCosts(0.0, asked.pass_ms, 0.02, 0.1, 0.0)
    found: list[dict[str, Any]] = []
    with slow_engine(costs) as engine:
        for point in POINTS:
            found.append(measured(engine, point, costs, asked.tokens, asked.repetitions))
            say(found)
            if asked.json:
                asked.json.write_text(json.dumps(found, indent=1) + "\n")


def say(found: Sequence[dict[str, Any]]) -> None:
    if len(found) == 1:
        heads = "mode, slots, RTT ms | measured | simulated | off | drafts take unhidden, ms | of that hidden"
        heads += " | rounds with drafts | mean time, of that without ready-first | pass, of its due"
        sys.stdout.write(f"| {heads} |\n{'|---' * 9}|\n")
    at = found[-1]
    end = f"{at['mean_end']:.2f}" if "mean_end" in at else ""
    measured = f"{at['measured']:.2f} ({at['least']:.2f} to {at['most']:.2f})"
    sys.stdout.write(
        f"| {at['mode']}, {at['slots']}, {at['rtt_ms']:g} | {measured} | {at['simulated']:.2f} | {at['off']:+.0%} "
        f"| {at['unhidden_ms']:.1f} | {at['hidden']:.2f} | {at['drafted']:.2f} | {end} | {at['pass_over']:.2f} |\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
