"""Rounds that are padded and computed as graphs: what they give, what they touch, and what a device sees of them. On a
CPU the work of a graph is done anew each time (`Repeated`), into the same memory. A real graph no machine of ours has.
"""

from array import array
from collections import Counter
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.gpu import exactness
from tests.worker.harness import Driver, Tiny
from tests.worker.pretended import Device, pretended
from worker_service.config import Settings
from worker_service.engine import graphs
from worker_service.engine.block_plan import BlockPlan, QueryRange
from worker_service.engine.drafting.drafter import NoDrafter
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.graphs import Graphs, Repeated, Size, padded, size_of
from worker_service.engine.types import Admission, Limits, Run, Sampling
from worker_service.model_files import ModelError
from worker_service.own_engine import build_engine, load_share

BLOCK_TOKENS = 4
SPARE = 99


@pytest.fixture(autouse=True)
def no_graphs_here() -> Iterator[None]:
    with patch.object(Graphs, "kind", Repeated):
        yield


@st.composite
def plans(draw: st.DrawFn) -> BlockPlan:
    """Of up to nine requests, whose blocks are all different."""
    ranges, begin, block = list[QueryRange](), 0, 0
    for _ in range(draw(st.integers(1, 9))):
        n, start = draw(st.integers(1, 5)), draw(st.integers(0, 30))
        count = (start + n - 1) // BLOCK_TOKENS + 1
        ranges.append(QueryRange(begin, n, start, array("i", range(block, block + count))))
        begin, block = begin + n, block + count
    return BlockPlan(ranges, BLOCK_TOKENS)


@given(plans())
def test_a_padded_round_has_every_token_once_and_writes_nothing_else_to_a_request(plan: BlockPlan) -> None:
    if (size := size_of(plan)) is None:
        return
    ids = list(range(1000, 1000 + int(plan.n.sum())))
    found = padded(plan, ids, size, SPARE)
    places = found.places[: len(ids)]
    assert found.ids[places].tolist() == ids
    written = list(zip(found.blocks[places].tolist(), found.offsets[places].tolist(), strict=True))
    assert written == list(zip(*(x.tolist() for x in plan.places()), strict=True))
    padding = sorted(set(range(size.requests * size.tokens)) - set(places.tolist()))
    assert set(found.blocks[padding].tolist()) <= {SPARE}
    tables = found.tables.reshape(size.requests, size.blocks)
    for place, (block, offset) in zip(places.tolist(), written, strict=True):
        position, table = found.positions[place], tables[place // size.tokens]
        assert (table[position // BLOCK_TOKENS], position % BLOCK_TOKENS) == (block, offset)


@given(plans())
def test_padding_is_never_most_of_a_round(plan: BlockPlan) -> None:
    if (size := size_of(plan)) is not None:
        assert size.requests * size.tokens <= 4 * plan.n.sum()
        assert size.requests * size.blocks <= 8 * plan.blocks.sum()


def test_one_long_text_among_short_ones_is_not_padded_to() -> None:
    tables = [array("i", range(40)), *(array("i", [40 + i]) for i in range(7))]
    ranges = [QueryRange(i, 1, 159 if i == 0 else 1, table) for i, table in enumerate(tables)]
    assert size_of(BlockPlan(ranges, BLOCK_TOKENS)) is None
    assert size_of(BlockPlan(ranges[:1], BLOCK_TOKENS)) == Size(1, 1, 64)


def run(tiny: Tiny, attention: str) -> Driver:
    """Requests in changing company, with drafts, exposed states and nothing else to tell them from others."""
    driver = Driver(tiny.engine(attention=attention, drafter=NgramDrafter(), block_tokens=8, host_blocks=16))
    samplings = [Sampling(logprobs=1), Sampling(temperature=0.9, seed=4), Sampling(repetition_penalty=1.3)]
    for i in range(7):
        text = "a short one and a long one and a short one " * (1 + i % 3)
        driver.admit(str(i), tiny.prompt(text), Limits(12, ignore_eos=True), samplings[i % 3])
    for begin in range(40):
        live = driver.live
        count = 1 + begin % 5
        names = (live[begin % max(len(live), 1) :] + live)[:count]
        driver.step([Run(name, begin % 4, 16) for name in names])
        if live and begin % 7 == 3:
            driver.engine.offload(live[0])
    driver.finish_all()
    return driver


def test_graphs_change_neither_texts_nor_the_kv_of_any_request(tiny: Tiny) -> None:
    replays = Counter[str]()

    class Counting(Repeated):
        def replay(self) -> graphs.Results:
            replays["all"] += 1
            return super().replay()

    with patch.object(Graphs, "kind", Counting):
        plain, graphed = run(tiny, "torch"), run(tiny, "graphs")
    assert graphed.outputs == plain.outputs
    assert graphed.finished == plain.finished
    assert replays["all"] > 20
    known, own = (driver.engine.target._memory._data for driver in (plain, graphed))
    for before, now in zip(known, own, strict=True):
        assert torch.allclose(before, now[:, :-1], atol=1e-5)  # the last block is nobody's
        assert now[:, -1].abs().sum() > 0
    logprobs = [[each.logprob for row in driver.rows for each in row.logprobs] for driver in (plain, graphed)]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_padded_pass_gives_each_row_what_it_gives_unpadded(dtype: torch.dtype) -> None:
    """Logits, hidden states and exposed ones, of rounds of every size that drafts make."""
    cpu, found = torch.device("cpu"), {}
    for attention in ("torch", "graphs"):
        engine = Engine(
            exactness.model_on(cpu, dtype),
            exactness.tokenizer(),
            eos_ids=frozenset(),
            context_tokens=256,
            blocks=64,
            block_tokens=8,
            drafter=NoDrafter(),
            attention=attention,
        )
        engine.target.expose([0, 2, 3])
        passes, forward = [], engine.target.forward

        def keep(sequences, forward=forward, passes=passes):  # type: ignore[no-untyped-def]
            passes.append(forward(sequences))
            return passes[-1]

        with patch.object(engine.target, "forward", keep):
            names = [str(i) for i in range(5)]
            for i, name in enumerate(names):
                prompt = list(range(3 + 4 * i, 12 + 6 * i))
                engine.admit(Admission(name, 1, prompt, len(prompt), Sampling(), Limits(30), salt=name))
            engine.step([Run(name, 0, 256) for name in names], 5)
            for count in (1, 2, 3, 4, 5):
                engine.step([Run(name, 0, 256) for name in names[:count]], count)
        found[attention] = passes
    atol = 1e-4 if dtype == torch.float32 else 0.1
    for plain, graphed in zip(found["torch"], found["graphs"], strict=True):
        assert torch.allclose(graphed.logits, plain.logits, atol=atol)
        assert torch.allclose(graphed.hidden, plain.hidden, atol=atol)
        assert torch.allclose(graphed.states, plain.states, atol=atol)


def test_within_a_graph_nobody_waits_and_nothing_is_sent() -> None:
    """What would break a recording, or be done once and never again."""
    within = list[Counter[str]]()

    with pretended() as device:
        engine = on_a_gpu(device, within)
        device.counts.clear()
        engine.step(RUNS, len(RUNS))
        whole = Counter(device.counts)
    assert len(within) == 3  # recorded, replayed, and replayed again
    for counts in within:
        assert counts["operations"] > 100
        assert counts["waits"] == counts["to device"] == counts["to host"] == 0
    assert whole["waits"] == 1
    assert whole["to device"] == 1
    assert whole["operations"] - within[-1]["operations"] <= 40  # what is launched beside the graph


RUNS = [Run(str(i), 0, 64) for i in range(3)]


def on_a_gpu(device: Device, within: list[Counter[str]]) -> Engine:
    """An engine on the pretended device that has decoded once. `within`: what the work of its graphs costs."""
    cuda = torch.device("cuda", 0)

    class Watched(Repeated):
        def __init__(self, work: graphs.Work, device_: torch.device) -> None:
            def watched() -> graphs.Results:
                before = Counter(device.counts)
                results = work()
                within.append(Counter({key: device.counts[key] - before[key] for key in device.counts}))
                return results

            super().__init__(watched, device_)

    patcher = patch.object(Graphs, "kind", Watched)
    patcher.start()
    try:
        engine = Engine(
            exactness.model_on(cuda, torch.float32),
            exactness.tokenizer(),
            eos_ids=frozenset(),
            context_tokens=256,
            blocks=64,
            block_tokens=8,
            drafter=NoDrafter(),
            attention="graphs",
        )
        for i in range(len(RUNS)):
            engine.admit(Admission(str(i), 1, [*range(20), i], 21, Sampling(), Limits(9, ignore_eos=True), salt=str(i)))
        engine.step(RUNS, len(RUNS))  # a prefill, which is too long for a graph
        assert not within
        engine.step(RUNS, len(RUNS))
        return engine
    finally:
        patcher.stop()


def test_graphs_are_few_and_the_one_not_used_for_longest_goes(tiny: Tiny) -> None:
    with patch.object(graphs, "KEPT", 2):
        driver = run(tiny, "graphs")
        assert len(driver.engine.target._graphs._known) == 2


def test_a_graph_is_recorded_beside_what_runs_and_replayed_by_itself() -> None:
    """The order of calls, as CUDA asks for it."""
    said = list[str]()

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = "now" if name == "now" else "beside"

        def wait_stream(self, other: "Stream") -> None:
            said.append(f"{self.name} waits for {other.name}")

    class Recording:
        def __init__(self, graph: object, **options: object) -> None:
            said.append("stream ends" if isinstance(graph, Stream) else "")

        def __enter__(self) -> None:
            said.append("within")

        def __exit__(self, *_: object) -> None:
            said.append("without")

    class Graph:
        def replay(self) -> None:
            said.append("replayed")

    result = torch.ones(1), torch.ones(1), None

    def work() -> graphs.Results:
        said.append("work")
        return result

    names = {
        "current_stream": lambda _: Stream("now"),
        "Stream": Stream,
        "stream": Recording,
        "graph": Recording,
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: (0, 1),
    }
    with patch.multiple(torch.cuda, **names), patch.object(graphs.CudaGraph, "_pool", None):
        graph = graphs.CudaGraph(work, torch.device("cuda", 0))
        assert graph.replay() is result
    said = [each for each in said if each and each != "stream ends"]
    assert said == [
        *("beside waits for now", "within", "work", "without", "now waits for beside"),
        *("within", "work", "without", "replayed"),
    ]


def test_a_worker_on_a_gpu_starts_with_graphs_and_elsewhere_says_what_they_are_for(tiny: Tiny) -> None:
    settings = Settings(model=str(tiny.folder), device="cuda:0", attention="graphs", kv_tokens=1024, dtype="float32")
    with pretended():
        engine = build_engine(settings, load_share(settings, None), context_tokens=512)  # it passes the self-check
        assert engine.target._graphs._known
    on_cpu = settings.model_copy(update={"device": "cpu"})
    with pytest.raises(ModelError, match="attention: graphs are of a model that is whole on one GPU"):
        load_share(on_cpu, None)
    with pytest.raises(ValueError, match="attention: graphs is not for a model over --stages"):
        Settings(model="any", attention="graphs", stages=2, rendezvous="127.0.0.1:1")
