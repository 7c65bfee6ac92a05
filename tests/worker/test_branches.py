"""Drafts that begin with different tokens, verified in one pass: what comes of them is what came without."""

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protos.structure import grammar
from protos.v1.types_pb2 import Structure
from tests.gpu import forking
from tests.gpu.repeated import Repeated
from tests.worker.harness import Driver, Tiny
from tests.worker.test_exactness import TEXTS
from worker_service.engine import native, proposals
from worker_service.engine.attention import PagedAttention, QueryRange, paged_attention
from worker_service.engine.drafting.drafter import Ask, Drafter, NoDrafter, Seen, Verified
from worker_service.engine.engine import Engine
from worker_service.engine.graphs import Graphs
from worker_service.engine.kv import KV, BlockPool
from worker_service.engine.pass_costs import PassCosts
from worker_service.engine.probe import Options
from worker_service.engine.shape import AttentionShape
from worker_service.engine.types import Limits, Run, Sampling

needs_kernels = pytest.mark.skipif(native.kernels() is None, reason="no native kernels here")

FREE = (0.01, 0.0)  # a pass takes as long with any number of rows


class Forking(forking.Forking):
    """Remembers what it is told, too."""

    layers = (1,)

    def __init__(self, texts: dict[str, list[int]], right: int = 3) -> None:
        super().__init__(texts, right)
        self.seen: dict[str, dict[int, torch.Tensor]] = {}
        self.hidden: dict[tuple[str, int], torch.Tensor] = {}

    def read(self, seen: Sequence[Seen]) -> None:
        for ask, start, states in seen:
            self.seen.setdefault(ask.request_id, {}).update(enumerate(states.clone(), start))

    def verified(self, rounds: Sequence[Verified]) -> None:
        self.hidden |= {(id, len(tokens)): hidden.clone() for id, tokens, hidden, _ in rounds}


class Watching(Forking):
    """The same, and drafts nothing."""

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [[] for _ in asks]


def run(tiny: Tiny, drafter: Drafter, sampling: Sampling, **options: Any) -> Driver:
    return answered(tiny, tiny.engine(drafter=drafter, block_tokens=16, **options), sampling)


def answered(tiny: Tiny, engine: Engine, sampling: Sampling) -> Driver:
    limits, driver = Limits(40, ignore_eos=True), Driver(engine)
    driver.engine.weigh_drafts(PassCosts(*FREE))
    for name, text in zip("abc", TEXTS, strict=False):
        driver.admit(name, tiny.prompt(text), limits, sampling)
    while len(driver.finished) < 3:
        driver.step([Run(name, 6, 64) for name in "abc" if name not in driver.finished])
    return driver


def texts(tiny: Tiny, driver: Driver) -> dict[str, list[int]]:
    return {name: tiny.prompt(text) + driver.outputs[name] for name, text in zip("abc", TEXTS, strict=False)}


@needs_kernels
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(logprobs=3),
        Sampling(temperature=0.9, top_p=0.9, seed=4, logprobs=0),
        Sampling(repetition_penalty=1.3, frequency_penalty=0.4, logprobs=0),
    ],
    ids=["greedy", "drawn", "penalties"],
)
def test_what_follows_a_branch_is_what_plain_decoding_gives_to_the_bit(tiny: Tiny, sampling: Sampling) -> None:
    watching = Watching({})
    plain = run(tiny, watching, sampling)
    forking = Forking(texts(tiny, plain))
    forked = run(tiny, forking, sampling)

    assert forked.outputs == plain.outputs
    assert told(forked) == told(plain)
    assert len(forked.rows) < 0.7 * len(plain.rows), "branches were not followed"
    assert sum(row.accepted for row in forked.rows) > 0 < sum(row.branched for row in forked.rows)
    assert all(row.accepted <= row.drafted <= 6 for row in forked.rows)
    assert all(torch.equal(hidden, watching.hidden[at]) for at, hidden in forking.hidden.items())
    for name, states in forking.seen.items():
        assert all(torch.equal(state, watching.seen[name][at]) for at, state in states.items())


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=4)], ids=["greedy", "drawn"])
def test_branches_change_no_text_of_torchs_attention(tiny: Tiny, sampling: Sampling) -> None:
    watching = Watching({})
    plain = run(tiny, watching, sampling, attention="torch")
    forking = Forking(texts(tiny, plain))
    forked = run(tiny, forking, sampling, attention="torch")

    assert forked.outputs == plain.outputs
    assert len(forked.rows) < 0.7 * len(plain.rows), "branches were not followed"
    for name, states in forking.seen.items():
        assert all(torch.allclose(state, watching.seen[name][at], atol=1e-4) for at, state in states.items())


def test_where_passes_are_graphs_a_request_has_one_chain(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graphs, "kind", Repeated)
    driver = run(tiny, Forking({name: [7] * 500 for name in "abc"}), Sampling(), attention="graphs")
    assert sum(row.drafted for row in driver.rows) > 0 == sum(row.branched for row in driver.rows)


def told(driver: Driver) -> dict[str, list[object]]:
    return {name: [each for row in driver.rows if row.request_id == name for each in row.logprobs] for name in "abc"}


def test_no_block_is_lost_to_branches(tiny: Tiny) -> None:
    plain = run(tiny, NoDrafter(), Sampling())
    driver = run(tiny, Forking(texts(tiny, plain)), Sampling())
    for name in "abc":
        driver.engine.forget(name)
    assert driver.engine.free_blocks == driver.engine.blocks
    assert all(references == 0 for references in driver.engine.pool.references)


def test_without_a_free_block_the_longest_chain_alone_is_verified(tiny: Tiny) -> None:
    prompt, limits = tiny.prompt(TEXTS[0]), Limits(14, ignore_eos=True)
    blocks = -(-(len(prompt) + 14) // 16)
    plain = Driver(tiny.engine(drafter=NoDrafter(), blocks=blocks, block_tokens=16))
    plain.admit("a", prompt, limits)
    plain.finish_all()
    drafter = Forking({"a": prompt + plain.outputs["a"]})
    driver = Driver(tiny.engine(drafter=drafter, blocks=blocks, block_tokens=16))
    driver.engine.weigh_drafts(PassCosts(*FREE))
    driver.admit("a", prompt, limits)
    while not driver.finished:
        taken = driver.engine.free_blocks == 0
        (row,) = driver.step([Run("a", 4, 64)])
        assert not (taken and row.branched)
    assert driver.outputs == plain.outputs


def test_a_grammar_that_looks_ahead_has_one_chain(tiny: Tiny) -> None:
    driver = Driver(tiny.engine(drafter=Forking({"a": [7] * 500}), block_tokens=16))
    driver.engine.weigh_drafts(PassCosts(*FREE))
    driver.admit("a", tiny.prompt(TEXTS[0]), Limits(20), Sampling(grammar=grammar(Structure(regex="[ab]{12}"))))
    driver.finish_all()
    assert sum(row.branched for row in driver.rows) == 0


@pytest.mark.parametrize("kind", [pytest.param("auto", marks=needs_kernels), "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 1, 15, 16, 31, 32, 45, 63])
def test_a_range_with_a_source_attends_as_if_its_text_were_the_only_one(
    start: int, dtype: torch.dtype, kind: str
) -> None:
    shape = AttentionShape(4, 2, 32)
    torch.manual_seed(start)
    n, before, root = 5, max(start - 1, 0), min(start, 1)

    def some(rows: int) -> list[torch.Tensor]:
        return [torch.randn(rows, heads, shape.dim).to(dtype) for heads in (4, 2, 2)]

    past, newest, own, other = some(before), some(root), some(n), some(2)

    def attention() -> PagedAttention:
        made = paged_attention([shape], 512, 12, 32, torch.device("cpu"), dtype, kind)
        made._data[0][:].fill_(torch.nan)  # a block holds what an earlier request left
        if before:
            made.begin([QueryRange(0, before, 0, array("i", [0, 1, 2]))])
            made.attend(*past, 0, Options(0.2, 0, 0.0, None))
        return made

    options = Options(0.2, 0, 0.0, None)
    alone = attention()
    alone.begin([QueryRange(0, root + n, before, array("i", [0, 1, 2]))])
    expected = alone.attend(*together(newest, own), 0, options)[root:]

    forked, table = attention(), array("i", [0, 1, 2])
    first = start // 32
    fork = table[:first] + array("i", [7, 8, 9])
    ranges = [
        QueryRange(0, root + 2, before, table),
        QueryRange(root + 2, n, start, fork, table[first] if start % 32 else -1),
    ]
    forked.begin(ranges)
    found = forked.attend(*together(newest, other, own), 0, options)[root + 2 :]
    rounding = {"auto": 0.0, "torch": 1e-6 if dtype == torch.float32 else 0.02}  # torch's sums depend on the pass
    assert torch.allclose(found, expected, atol=rounding[kind], rtol=0)


def together(*parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat(each) for each in zip(*parts, strict=True)]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 9), st.booleans())
def test_a_fork_gives_back_what_it_took(length: int, tokens: int, drafts: int, merged: bool) -> None:
    pool = BlockPool(24, 4)
    kv = KV(pool)
    kv.extend(length + drafts)
    blocks = list(kv.table)
    fork = kv.fork(length, tokens)
    assert fork is not None
    assert list(fork.table[: length // 4]) == blocks[: length // 4]
    assert fork.source == (blocks[length // 4] if length % 4 else -1)
    if merged:
        kv.merge(fork, length + tokens)
        assert kv.length == length + tokens <= 4 * len(kv.table)
        assert kv.table[: len(fork.table)] == fork.table
    else:
        kv.abandon(fork)
        assert list(kv.table) == blocks
    assert len(set(kv.table)) == len(kv.table) == 24 - pool.free_blocks
    kv.release()
    assert pool.free_blocks == 24


def test_there_is_no_fork_where_blocks_are_short() -> None:
    kv = KV(BlockPool(3, 4))
    kv.extend(8)
    assert kv.fork(6, 3) is None
    assert kv.fork(6, 2) is not None


def test_a_request_of_a_long_text_has_one_chain(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further chain would attend to all of it anew."""
    monkeypatch.setattr(proposals, "_LONG", 105)
    driver = Driver(tiny.engine(drafter=Forking({"a": [7] * 300}), block_tokens=16))
    driver.engine.weigh_drafts(PassCosts(*FREE))
    driver.admit("a", [5] * 100, Limits(12, ignore_eos=True))
    while not driver.finished:
        (row,) = driver.step([Run("a", 4, 256)])
        assert (row.branched > 0) == (row.drafted > 0 and row.start + 100 < 105)
    assert sum(row.branched for row in driver.rows) > 0


def test_where_rows_are_dear_nobody_is_asked_for_second_guesses(tiny: Tiny) -> None:
    asked: list[int] = []

    class Noting(NoDrafter):
        def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
            asked.extend(ask.chains for ask in asks)
            return super().propose(asks)

    for row_s in (0.0, 0.01):
        driver = Driver(tiny.engine(drafter=Noting(), block_tokens=16))
        driver.engine.weigh_drafts(PassCosts(0.01, row_s))
        driver.admit("a", tiny.prompt(TEXTS[0]), Limits(4, ignore_eos=True))
        driver.finish_all()
        assert set(asked) == ({4} if row_s == 0 else {1})
        asked.clear()
