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
from tests.gpu.repeated import Repeated
from tests.worker.harness import Driver, Tiny
from tests.worker.pretended import Device, pretended
from worker_service.config import Settings
from worker_service.engine import graphs
from worker_service.engine.block_plan import BlockPlan, QueryRange
from worker_service.engine.drafting.drafter import NoDrafter
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.graphs import Graphs, Size, padded, size_of
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
        assert size.requests * size.tokens <= 2 * plan.n.sum()
        assert size.requests * size.blocks <= 2 * plan.blocks.sum()


def test_one_long_text_among_short_ones_is_not_padded_to() -> None:
    tables = [array("i", range(40)), *(array("i", [40 + i]) for i in range(7))]
    ranges = [QueryRange(i, 1, 159 if i == 0 else 1, table) for i, table in enumerate(tables)]
    assert size_of(BlockPlan(ranges, BLOCK_TOKENS)) is None
    assert size_of(BlockPlan(ranges[:1], BLOCK_TOKENS)) == Size(1, 1, 64)


def test_rounds_of_equal_requests_are_all_worth_a_graph_and_sizes_are_few() -> None:
    """However many requests and blocks each, up to the longest pass."""
    sizes = set()
    for requests in range(1, 65):
        for blocks in range(1, 200):
            start, table = BLOCK_TOKENS * blocks - 1, array("i", range(blocks))
            plan = BlockPlan([QueryRange(i, 1, start, table) for i in range(requests)], BLOCK_TOKENS)
            sizes.add(size_of(plan))
    assert None not in sizes
    assert len(sizes) < 250


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
    assert len(within) == 3  # as a recording does, looked at, and replayed
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
        def __init__(self, work: graphs.Work, device_: torch.device, like: object) -> None:
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
    with patch.object(graphs, "KEPT", 2), patch.object(graphs, "KEPT_ROUNDS", 0):
        driver = run(tiny, "graphs")
        assert len(driver.engine.target._graphs._known) == 2


class Numbers:
    """Graphs whose passes give the numbers of their tokens. `recorded`: how often one was made."""

    def __init__(self) -> None:
        self.graphs = Graphs(self.compute, lambda _: None, BLOCK_TOKENS, SPARE, torch.device("cpu"))
        self.recorded = 0

    def compute(self, given: graphs.PaddedRound, size: Size) -> graphs.Results:
        return given.ids[:, None].float(), given.positions[:, None].float(), None

    def run(self, blocks: int) -> list[float] | None:
        """Of one token after a text of so many blocks: its number is that, too."""
        before = list(self.graphs._known)
        ranges = [QueryRange(0, 1, BLOCK_TOKENS * blocks - 1, array("i", range(blocks)))]
        results = self.graphs.run([blocks], [0], ranges)
        self.recorded += any(size not in before for size in self.graphs._known)
        return None if results is None else results[0][0].tolist()


def test_a_graph_keeps_its_place_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    """Else of three sizes in turn each would be recorded again and again, to be replayed once."""
    with patch.object(graphs, "KEPT", 2), patch.object(graphs, "KEPT_ROUNDS", 50):
        numbers = Numbers()
        results = [numbers.run(1 << i % 3) for i in range(100)]
    assert numbers.recorded <= 2 + 2
    assert results[:3] == [[1.0], [2.0], None]
    assert results.count(None) <= 40
    assert all(result in (None, [1 << i % 3]) for i, result in enumerate(results))
    assert not caplog.records


@pytest.mark.parametrize("fails_at", [1, 3])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("not permitted")], ids=str)
def test_where_recording_fails_requests_are_served_without_graphs(
    tiny: Tiny, fails_at: int, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    made = list[int]()

    class Failing(Repeated):
        def __init__(self, work: graphs.Work, device: torch.device, like: object) -> None:
            super().__init__(work, device)
            made.append(1)
            if len(made) == fails_at:
                raise error

    with patch.object(Graphs, "kind", Failing):
        plain, graphed = run(tiny, "torch"), run(tiny, "graphs")
    assert graphed.outputs == plain.outputs
    assert graphed.finished == plain.finished
    assert len(made) == fails_at  # nothing is tried again
    assert not graphed.engine.target._graphs._known
    (said,) = [record.getMessage() for record in caplog.records if "without graphs" in record.getMessage()]
    assert said.endswith(f"{type(error).__name__}: {error}")


def test_a_graph_that_writes_nothing_is_found_before_anybody_gets_its_results(caplog: pytest.LogCaptureFixture) -> None:
    """As one that was recorded on another stream than its work ran on: what the work itself wrote still lies there."""

    class Empty(Repeated):
        def __init__(self, work: graphs.Work, device: torch.device, like: object) -> None:
            super().__init__(work, device)
            self._results = work()

        def replay(self) -> graphs.Results:
            return self._results

    with patch.object(Graphs, "kind", Empty):
        numbers = Numbers()
        assert [numbers.run(1), numbers.run(2)] == [None, None]
    assert "does not write its results" in caplog.text


@pytest.mark.parametrize("fails", ["", "for good", "for torch too"])
def test_a_graph_is_recorded_on_its_own_device_beside_what_runs_and_replayed_by_itself(fails: str) -> None:
    """The order of calls, as CUDA asks for it. A recording that fails leaves the stream as it was, and torch, unless it
    knows itself, hears that it is over."""
    said, cuda, handles = list[str](), torch.device("cuda", 1), iter(["its own"])

    class Stream:
        def __init__(self, device: object) -> None:
            assert device == cuda
            self.name = "beside"

        def wait_stream(self, other: "Stream") -> None:
            said.append(f"{self.name} waits for {other.name}")

    now = Stream(cuda)
    now.name = "now"

    class Within:
        def __init__(self, *what: object, **options: object) -> None:
            self.name = getattr(what[0], "name", str(what[0]))
            if options:
                assert options["stream"].name == "beside"  # type: ignore[attr-defined]
                said.append(f"memory of {options['pool']}")
                self.name = "recording"

        def __enter__(self) -> None:
            said.append(f"within {self.name}")

        def __exit__(self, *_: object) -> None:
            said.append(f"without {self.name}")

    class Graph:
        name = "graph"

        def replay(self) -> None:
            said.append("replayed")

    result = torch.ones(1), torch.ones(1), None

    def work() -> graphs.Results:
        said.append("work")
        if fails and said.count("work") == 2:
            raise torch.OutOfMemoryError
        return result

    def device_of(stream: Stream) -> None:
        said.append(f"set {stream.name}")

    def end(device: int, pool: str) -> None:
        if fails == "for torch too":
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        said.append(f"memory of {pool} on {device} is over")

    def release(device: int, pool: str) -> None:
        said.append(f"memory of {pool} on {device} is free")

    names = {
        "graph_pool_handle": lambda: next(handles),
        "device": Within,
        "current_stream": lambda device: now,
        "Stream": Stream,
        "stream": Within,
        "set_stream": device_of,
        "graph": Within,
        "CUDAGraph": Graph,
    }
    recorded = [
        *("within cuda:1", "beside waits for now", "within beside", "work", "without beside", "now waits for beside"),
        *("memory of its own", "within recording", "work", "without recording"),
        *(("memory of its own on 1 is over", "memory of its own on 1 is free") if fails == "for good" else ()),
        *("set now", "without cuda:1"),
    ]
    ending = {"_cuda_endAllocateToPool": end, "_cuda_releasePool": release}
    with patch.multiple(torch.cuda, **names), patch.multiple(torch._C, create=True, **ending):
        if fails:
            with pytest.raises(torch.OutOfMemoryError):
                graphs.CudaGraph(work, cuda)
            assert said == recorded
            return
        graph = graphs.CudaGraph(work, cuda)
        assert graph.replay() is result
        assert said == [*recorded, "replayed"]
        said.clear()
        graphs.CudaGraph(work, cuda, graph)
    assert said == recorded


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
