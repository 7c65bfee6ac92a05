"""Passes of few tokens as CUDA graphs: recorded once for each size, then launched as one, instead of a thousand small
operations one by one. What a pass computes is not known here. Off unless asked for: no GPU has run this yet.

A graph computes where it was recorded. So a round is padded to one of a few sizes, and its numbers are written into the
buffer that the graph of this size reads. Tokens that are padding write their KV into a block that no request has.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from worker_service.engine.block_plan import BlockPlan, QueryRange
from worker_service.engine.upload import sent_together

MOST_EACH = 17  # tokens of a request: more are prefill, whose every length would be another size
MOST_TOKENS = 512  # of a padded round: longer ones keep a GPU busy without graphs
MOST_PADDING = 2  # times the tokens of a round, and the blocks of its KV, that its size has at most
KEPT = 64  # graphs; the one that was not used for longest goes first
KEPT_ROUNDS = (
    1000  # that a graph stays at least: where there are more sizes than places, most would be recorded for once
)

# Of a pass, as in Passed: logits and hidden states of the tokens that are asked for, exposed states of all.
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
Work = Callable[[], Results]


class CudaGraph:
    """Work that is recorded: `replay` does it again on what is in the same memory by then, and its results lie where
    they lay before."""

    def __init__(self, work: Work, device: torch.device, like: Any = None) -> None:
        """`like`: another one, with which it shares the memory between their operations."""
        with torch.cuda.device(device):
            now = torch.cuda.current_stream(device)
            self._stream = like._stream if like else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(now)
            with torch.cuda.stream(self._stream):
                work()  # what libraries do at their first call cannot be recorded
            now.wait_stream(self._stream)
            self._graph = torch.cuda.CUDAGraph()
            self._pool = like._pool if like else torch.cuda.graph_pool_handle()
            mode = "thread_local"
            try:  # torch's own stream for it would be of the device that was recorded on first
                with torch.cuda.graph(self._graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
                    self._results = work()
            except RuntimeError:
                _end_recording(device, self._pool)
                raise
            finally:  # which a recording that fails does not do
                torch.cuda.set_stream(now)

    def replay(self) -> Results:
        """Launches it; nobody waits."""
        self._graph.replay()
        return self._results


def _end_recording(device: torch.device, pool: Any) -> None:
    """Torch up to 2.12 never ends one that CUDA gave up: from then on `empty_cache` raises, and memory that two streams
    used is never free again. Newer ones have ended it by now, and say so."""
    with suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


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
    """The next power of two in each, or, where that is too much padding, one of four sizes between two powers. None:
    not worth a graph, for it is long, or has too much padding even so."""
    requests, tokens, blocks = len(plan.n), int(plan.n.max(initial=0)), int(plan.blocks.max(initial=0))
    if not 0 < tokens <= MOST_EACH:
        return None
    most_tokens, most_blocks = (MOST_PADDING * int(each.sum()) for each in (plan.n, plan.blocks))
    for steps in (1, 4):
        size = Size(_up(requests, steps), tokens, _up(blocks, steps))
        if size.requests * tokens <= min(most_tokens, MOST_TOKENS) and size.requests * size.blocks <= most_blocks:
            return size
    return None


def _up(n: int, steps: int) -> int:
    """The next of `steps` sizes between a power of two and the next one."""
    step = max((1 << (n - 1).bit_length()) // (2 * steps), 1)
    return -(-n // step) * step


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
    # No request's table has the spare block: a broken text's padding writes there what is no number.
    tables = np.full((size.requests, size.blocks), spare)
    own = plan.padded(np.arange(requests, dtype=np.int32))[2]
    tables[:requests] = own[:, -1:]
    tables[:requests, : own.shape[1]] = own
    return PaddedRound(
        ids=spread(ids),
        positions=spread(plan.start[owner] + within),
        blocks=spread(blocks, otherwise=spare),
        offsets=spread(offsets),
        tables=tables.ravel(),
        places=spread(places, at=slice(len(places))),
    )


class _Known(NamedTuple):
    numbers: torch.Tensor  # that the graph reads
    places: torch.Tensor  # of these, PaddedRound's
    graph: Any  # of `Graphs.kind`
    since: int  # which round it was recorded in


class Graphs:
    """Those of one model. A round that has none of its size yet is recorded first."""

    kind: type[Any] = CudaGraph  # tests have another, for devices that record nothing

    def __init__(
        self,
        compute: Callable[[PaddedRound, Size], Results],
        clear: Callable[[torch.Tensor], None],
        block_tokens: int,
        spare: int,
        device: torch.device,
    ) -> None:
        """`compute`: the pass of a round whose numbers are on the device; of no other memory may it take its input.
        `clear`: is given the blocks that a round begins, before it is computed. `spare`: the block that no request
        has."""
        self._compute, self._clear, self._block_tokens, self._spare = compute, clear, block_tokens, spare
        self._device = device
        self._rows: list[torch.Tensor] = []  # where every graph writes its results: they count until the next one does
        self._known: OrderedDict[Size, _Known] = OrderedDict()
        self._rounds, self._off = 0, False

    def run(self, ids: Sequence[int], wanted: Sequence[int], ranges: Sequence[QueryRange]) -> Results | None:
        """What `compute` gives of these tokens. None: this round is to be computed otherwise, for it has no size, no
        place, or no recording has succeeded, of which then no other is tried."""
        plan = BlockPlan(ranges, self._block_tokens)
        if self._off or (size := size_of(plan)) is None:
            return None
        self._rounds += 1
        if size not in self._known and not self._has_place():
            return None
        round_ = padded(plan, ids, size, self._spare)
        everything = [plan.begun(), np.concatenate(round_), round_.places[list(wanted)]]
        begun, numbers, chosen = sent_together(everything, self._device)
        self._clear(begun)
        results: Results | None
        if known := self._known.get(size):
            self._known.move_to_end(size)
            known.numbers.copy_(numbers)
            results = known.graph.replay()
        else:
            results = self._recorded(size, numbers, [len(part) for part in round_])
        if results is None:
            return None
        logits, hidden, states = results
        places = self._known[size].places[: len(ids)]
        return logits[chosen], hidden[chosen], None if states is None else states[places]

    def _has_place(self) -> bool:
        """Whether one more may be kept, if need be in place of another."""
        if len(self._known) < KEPT:
            return True
        old = next((size for size, known in self._known.items() if self._rounds - known.since >= KEPT_ROUNDS), None)
        if old is not None:
            del self._known[old]
        return old is not None

    def _recorded(self, size: Size, numbers: torch.Tensor, lengths: list[int]) -> Results | None:
        """The results of a new graph, of these numbers. None: from now on there are no graphs."""
        parts, problem = PaddedRound(*torch.split(numbers, lengths)), ""
        like = next((known.graph for known in self._known.values()), None)
        try:
            graph = self.kind(lambda: self._kept(self._compute(parts, size)), self._device, like)
            for rows in self._rows:  # which the same work has just written, not yet as a graph
                rows.fill_(torch.finfo(rows.dtype).max)  # not NaN: a broken text has that
            results: Results = graph.replay()
            unwritten = [(x[parts.places, 0] == torch.finfo(x.dtype).max).any() for x in results if x is not None]
            if not any(map(bool, unwritten)):
                self._known[size] = _Known(numbers, parts.places, graph, self._rounds)
                return results
            problem = "what was recorded does not write its results"
        except RuntimeError as error:  # most likely there was no memory
            problem = f"{type(error).__name__}: {error}"
        logging.getLogger(__name__).warning("passes are computed without graphs from now on: %s", problem)
        self._off = True
        self._known.clear()
        self._rows.clear()
        return None

    def _kept(self, given: Results) -> Results:
        """A copy in the memory that all graphs share for it: logits of many sizes would take gigabytes."""
        if not self._rows:
            self._rows = [x.new_empty(MOST_TOKENS, x.shape[1]) for x in given if x is not None]
        logits, hidden, *states = (
            rows[: len(x)].copy_(x) for x, rows in zip(filter(torch.is_tensor, given), self._rows, strict=True)
        )
        return logits, hidden, states[0] if states else None
