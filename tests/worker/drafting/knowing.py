"""A drafter in a process of its own whose small model is made up: it knows the texts beforehand, is right where the
simulator's drafter would be, and takes as long as it is told. All else of it is real, and the way to it has a delay.

`python -m tests.worker.drafting.knowing SETTINGS`, the JSON of `Known`; prints its address.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

from scheduler_service.sim.drafter import Truth
from scheduler_service.sim.workload import Job
from tests.chaos.proxy import Proxy, Trouble
from tests.worker.drafting.recalling import Recalling
from worker_service.drafting.config import Settings
from worker_service.drafting.passes import Passes
from worker_service.drafting.service import Loaded, serve
from worker_service.engine.kv import BlockPool
from worker_service.engine.target import InputSequence, Passed

FAN, BLOCK_TOKENS = 4, 16


@dataclass(frozen=True)
class Known:
    """`texts`: a file with pairs of prompt and output. `right`: the chance of a first guess, `second`: of a second one
    where that is wrong, and each further one half as much. Milliseconds: a pass with one chain, each further chain of
    it, there and back."""

    texts: str
    right: float = 0.76
    second: float = 0.45
    supply_ms: float = 2.0
    chain_ms: float = 0.05
    rtt_ms: float = 0.0
    draft_len: int = 4
    port: int = 0
    vocab_size: int = 1 << 16
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]] = field(default=(), compare=False)


def job_of(number: int, tokens: int, right: float, draft_len: int) -> Job:
    """The simulator's job for the text of that number: rounds in which each guess is right with this chance."""
    random = Random(f"rounds {number}")
    rounds = [next((i for i in range(draft_len) if random.random() >= right), draft_len) for _ in range(tokens)]
    return Job(f"r{number}", 0.0, 1, tokens, tuple(rounds), draft_len)


class Knowing(Recalling):
    """Stands for a Target, as Recalling does, and takes as long as a pass is to take."""

    def __init__(self, known: Known) -> None:
        super().__init__()
        self._known, self.vocab_size = known, known.vocab_size
        self._truths = [
            Truth(job_of(number, len(output), known.right, known.draft_len), known.second)
            for number, (_, output) in enumerate(known.pairs)
        ]

    def new_pool(self, blocks: int, block_tokens: int) -> BlockPool:
        self._block_tokens = block_tokens
        self._kv = [[-1] * block_tokens for _ in range(blocks)]
        return BlockPool(blocks, block_tokens)

    def forward(self, sequences: Sequence[InputSequence]) -> Passed:
        begun_s, rows = time.perf_counter(), []
        for each in sequences:
            for place, token in enumerate(each.tokens, each.start):
                self._kv[each.kv.table[place // self._block_tokens]][place % self._block_tokens] = token
            if each.logits_from < len(each.tokens):
                text = [token for block in each.kv.table for token in self._kv[block]]
                row = torch.zeros(self.vocab_size)
                row[self._likeliest(text[: each.start + len(each.tokens)])] = torch.arange(FAN, 0, -1.0)
                rows.append(row)
        logits = torch.stack(rows) if rows else torch.zeros(0, self.vocab_size)
        due_s = begun_s + 1e-3 * (self._known.supply_ms + self._known.chain_ms * (len(sequences) - 1))
        time.sleep(max(0.0, due_s - time.perf_counter()))
        return Passed(logits, torch.empty(0), None)

    def _likeliest(self, text: Sequence[int]) -> list[int]:
        for (prompt, output), truth in zip(self._known.pairs, self._truths, strict=True):
            emitted = len(text) - len(prompt)
            if 0 <= emitted < len(output) and [*prompt, *output][: len(text)] == list(text):
                right, at = truth.wrong[emitted] != emitted + 1, emitted + 1
                place = 0 if right else next((n - 1 for n in range(2, FAN + 1) if truth.guessed(at, n)), FAN)
                found = [(output[emitted] + 1 + other) % self.vocab_size for other in range(FAN)]
                found[place:] = [output[emitted], *found[place:]]
                return found[:FAN]
        return list(range(FAN))


async def run(known: Known) -> None:
    async def load() -> Loaded:
        sizes = {"context_tokens": 4096, "blocks": 1024, "block_tokens": BLOCK_TOKENS, "lines": 512, "fan": FAN}
        return Loaded(passes=Passes(Knowing(known), **sizes), name="made up", vocabulary="")  # type: ignore[arg-type]

    proxy = Proxy(lambda: asyncio.open_connection("127.0.0.1", known.port))
    await proxy.start()
    with proxy.troubled(Trouble(delay_s=known.rtt_ms / 2e3)):
        sys.stdout.write(f"{proxy.address}\n")
        sys.stdout.flush()
        read = Settings(model="made up", port=known.port, log_level="error", _cli_parse_args=False)  # type: ignore[call-arg]
        await serve(read, load)


def main() -> None:
    settings = json.loads(sys.argv[1])
    asyncio.run(run(Known(**settings, pairs=json.loads(Path(settings["texts"]).read_text()))))


if __name__ == "__main__":
    main()
