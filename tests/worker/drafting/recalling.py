"""A model for the drafter's tests whose KV is the tokens themselves: a pass recalls each text from its blocks alone, so
a wrong block, or one that was kept too long, gives a wrong guess."""

from array import array
from collections.abc import Sequence

import torch

from worker_service.drafting.passes import Passes
from worker_service.drafting.texts import Guess, Name, Text, Wish
from worker_service.engine.drafting.prefix import EMPTY, extended
from worker_service.engine.kv import BlockPool
from worker_service.engine.target import InputSequence, Passed

VOCABULARY, FAN, BLOCKS, BLOCK_TOKENS, CONTEXT = 50, 4, 24, 4, 60


def likeliest(text: Sequence[int]) -> list[int]:
    """What may follow a text, the best first."""
    first = extended(EMPTY, text) % VOCABULARY
    return [(first + 7 * place) % VOCABULARY for place in range(FAN)]


def greedy(text: Sequence[int], tokens: int) -> list[int]:
    whole = list(text)
    for _ in range(tokens):
        whole.append(likeliest(whole)[0])
    return whole[len(text) :]


class Recalling:
    """Stands for a Target."""

    vocab_size = VOCABULARY

    def __init__(self) -> None:
        self.passes: list[list[int]] = []  # tokens of each line of each pass

    def new_pool(self, blocks: int, block_tokens: int) -> BlockPool:
        self._kv = [[-1] * block_tokens for _ in range(blocks)]
        return BlockPool(blocks, block_tokens)

    def forward(self, sequences: Sequence[InputSequence]) -> Passed:
        self.passes.append([len(sequence.tokens) for sequence in sequences])
        for each in sequences:
            for place, token in enumerate(each.tokens, each.start):
                self._kv[each.kv.table[place // BLOCK_TOKENS]][place % BLOCK_TOKENS] = token
        rows = []
        for each in sequences:
            text = [token for block in each.kv.table for token in self._kv[block]]
            for end in range(each.start + each.logits_from, each.start + len(each.tokens)):
                row = torch.zeros(VOCABULARY)
                row[likeliest(text[: end + 1])] = torch.arange(FAN, 0, -1.0)
                rows.append(row)
        return Passed(torch.stack(rows) if rows else torch.zeros(0, VOCABULARY), torch.empty(0), None)


def passes(model: Recalling | None = None, *, blocks: int = BLOCKS, lines: int = 8) -> Passes:
    kv = {"blocks": blocks, "block_tokens": BLOCK_TOKENS}
    return Passes(model or Recalling(), context_tokens=CONTEXT, lines=lines, fan=FAN, **kv)  # type: ignore[arg-type]


def learn(
    drafting: Passes, handle: int, start: int, tokens: Sequence[int], wish: Wish, salt: str = "one", session: int = 1
) -> Guess | None:
    return drafting.texts.learn(Name(session, handle), start, array("i", tokens), wish, salt)


def text(drafting: Passes, handle: int) -> Text:
    return drafting.texts.by_name[Name(1, handle)]


def all_told(drafting: Passes) -> list[tuple[int, Guess]]:
    """What passes tell until nothing is wanted: handle and guess."""
    told: list[tuple[int, Guess]] = []
    while (made := drafting.run()) is not None:
        told += [(name.handle, guess) for name, guess in made]
    return told


def is_empty(drafting: Passes) -> bool:
    pool = drafting.texts.pool
    return pool.free_blocks == pool.blocks and not any(pool.references)
