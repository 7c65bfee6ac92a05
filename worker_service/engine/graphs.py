"""Passes of few tokens as CUDA graphs: recorded once for each size, then launched as one, instead of a thousand small
operations one by one. What a pass computes is not known here. Off unless asked for: no GPU has run this yet.

A graph computes where it was recorded. So a round is padded to one of a few sizes, and its numbers are written into the
buffer that the graph of this size reads. Tokens that are padding write their KV into a block that no request has.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from worker_service.engine.block_plan import BlockPlan, QueryRange
from worker_service.engine.upload import sent_together

MOST_EACH = 17  # tokens of a request: more are prefill, whose every length would be another size
MOST_TOKENS = 512  # of a padded round: longer ones keep a GPU busy without graphs
KEPT = 64  # graphs; the one that was not used for longest goes first

# Of a pass, as in Passed: logits and hidden states of the tokens that are asked for, exposed states of all.
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
Work = Callable[[], Results]


class CudaGraph:
    """Work that is recorded: `replay` does it again on what is in the same memory by then, and its results lie where
    they lay before. Graphs share the memory between their operations."""

    _pool: Any = None

    def __init__(self, work: Work, device: torch.device) -> None:
        now, beside = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        beside.wait_stream(now)
        with torch.cuda.stream(beside):
            work()  # what libraries do at their first call cannot be recorded
        now.wait_stream(beside)
        CudaGraph._pool = CudaGraph._pool or torch.cuda.graph_pool_handle()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=CudaGraph._pool, capture_error_mode="thread_local"):
            self._results = work()

    def replay(self) -> Results:
        """Launches it; nobody waits."""
        self._graph.replay()
        return self._results


class Repeated:
    """The same of a device without graphs, for tests: the work is done anew."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self._work = work
        work()

    def replay(self) -> Results:
        """As of a graph."""
        return self._work()


class Size(NamedTuple):
    """Of a padded round: requests, tokens of each, and blocks of each one's KV."""

    requests: int
    tokens: int
    blocks: int


class PaddedRound(NamedTuple):
    """The numbers of a round, int64, flat: so many requests, each with so many tokens, as its size says."""

    ids: Any
    positions: Any
    blocks: Any  # where the KV of each token goes
    offsets: Any
    tables: Any  # of each request the blocks that its tokens see
    places: Any  # of the round's own tokens among all; zeros behind them


def size_of(plan: BlockPlan) -> Size | None:
    """None: not worth a graph, for it is long, or most of it would be padding."""
    requests, tokens, blocks = len(plan.n), int(plan.n.max(initial=0)), int(plan.blocks.max(initial=0))
    if not 0 < tokens <= MOST_EACH:
        return None
    if 2 * int(plan.n.sum()) < requests * tokens or 2 * int(plan.blocks.sum()) < requests * blocks:
        return None
    rows = 1 << (requests - 1).bit_length() if requests <= 8 else -(-requests // 8) * 8
    return Size(rows, tokens, 1 << (blocks - 1).bit_length()) if rows * tokens <= MOST_TOKENS else None


def padded(plan: BlockPlan, ids: Sequence[int], size: Size, spare: int) -> PaddedRound:
    """`ids`: of the plan's tokens. `spare`: the block that no request has."""
    requests, count = len(plan.n), size.requests * size.tokens
    owner = np.repeat(np.arange(requests), plan.n)
    within = np.arange(len(owner)) - plan.begin[owner]
    places = owner * size.tokens + within

    def spread(numbers: Any, at: Any = places, otherwise: int = 0) -> Any:
        result = np.full(count, otherwise)
        result[at] = numbers
        return result

    blocks, offsets = plan.places()
    tables = np.full((size.requests, size.blocks), spare)
    tables[:requests, : plan.blocks.max()] = plan.padded(np.arange(requests, dtype=np.int32))[2]
    return PaddedRound(
        ids=spread(ids),
        positions=spread(plan.start[owner] + within),
        blocks=spread(blocks, otherwise=spare),
        offsets=spread(offsets),
        tables=tables.ravel(),
        places=spread(places, at=slice(len(places))),
    )


class Graphs:
    """Those of one model. A round that has none of its size yet is recorded first."""

    kind: type[CudaGraph] | type[Repeated] = CudaGraph

    def __init__(
        self, compute: Callable[[PaddedRound, Size], Results], block_tokens: int, spare: int, device: torch.device
    ) -> None:
        """`compute`: the pass of a round whose numbers are on the device; of no other memory may it take its input.
        `spare`: the block of KV that no request has."""
        self._compute, self._block_tokens, self._spare, self._device = compute, block_tokens, spare, device
        self._rows: list[torch.Tensor] = []  # where every graph writes its results: they count until the next one does
        # The buffer of each size, its part `places`, and the graph that reads it.
        self._known: OrderedDict[Size, tuple[torch.Tensor, torch.Tensor, CudaGraph | Repeated]] = OrderedDict()

    def run(self, ids: Sequence[int], wanted: Sequence[int], ranges: Sequence[QueryRange]) -> Results | None:
        """What `compute` gives of these tokens. None: this round is to be computed otherwise."""
        plan = BlockPlan(ranges, self._block_tokens)
        if (size := size_of(plan)) is None:
            return None
        round_ = padded(plan, ids, size, self._spare)
        numbers, chosen = sent_together([np.concatenate(round_), round_.places[list(wanted)]], self._device)
        if size in self._known:
            self._known.move_to_end(size)
            self._known[size][0].copy_(numbers)
        else:
            parts = PaddedRound(*torch.split(numbers, [len(part) for part in round_]))
            graph = self.kind(lambda: self._kept(self._compute(parts, size)), self._device)
            self._known[size] = numbers, parts.places, graph
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        _, places, graph = self._known[size]
        logits, hidden, states = graph.replay()
        return logits[chosen], hidden[chosen], None if states is None else states[places[: len(ids)]]

    def _kept(self, given: Results) -> Results:
        """A copy in the memory that all graphs share for it: logits of many sizes would take gigabytes."""
        if not self._rows:
            self._rows = [x.new_empty(MOST_TOKENS, x.shape[1]) for x in given if x is not None]
        logits, hidden, *states = (
            rows[: len(x)].copy_(x) for x, rows in zip(filter(torch.is_tensor, given), self._rows, strict=True)
        )
        return logits, hidden, states[0] if states else None
