"""The arrays that say where tokens, keys and values are, against what is written plainly, range by range."""

from array import array
from random import Random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker_service.engine.block_plan import BlockPlan, QueryRange
from worker_service.engine.upload import sent_together


def some_ranges(random: Random, block_tokens: int) -> list[QueryRange]:
    """Of any length and past; tables have blocks beyond what is used, as reserved ones are."""
    ranges, begin = [], 0
    for _ in range(random.randint(1, 9)):
        n, start = random.choice([1, 1, 3, random.randint(1, 60)]), random.choice([0, random.randint(0, 300)])
        blocks = -(-(start + n) // block_tokens) + random.randint(0, 2)
        ranges.append(QueryRange(begin, n, start, array("i", random.choices(range(999), k=blocks))))
        begin += n
    return ranges


@given(random=st.randoms(use_true_random=False), block_tokens=st.sampled_from([1, 4, 16, 64]))
def test_every_token_has_its_place_and_every_range_its_blocks(random: Random, block_tokens: int) -> None:
    ranges = some_ranges(random, block_tokens)
    plan = BlockPlan(ranges, block_tokens)
    places = [(r.table[at // block_tokens], at % block_tokens) for r in ranges for at in range(r.start, r.start + r.n)]
    assert list(zip(*(x.tolist() for x in plan.places()), strict=True)) == places
    for i, each in enumerate(ranges):
        end = each.start + each.n
        own = plan.indices[plan.offsets[i] : plan.offsets[i + 1]].tolist()
        assert own == list(each.table[: -(-end // block_tokens)])
        assert (len(own) - 1) * block_tokens + plan.last_block_tokens[i] == end
        assert plan.first_tokens[i] == each.begin
    assert plan.first_tokens[-1] == sum(each.n for each in ranges)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60), st.booleans()), min_size=1, max_size=6))
def test_a_block_is_begun_by_what_writes_or_copies_its_first_token_and_does_not_fill_it(
    texts: list[tuple[int, int, bool]],
) -> None:
    size, ranges, expected = 16, list[QueryRange](), list[int]()
    for number, (n, start, forks) in enumerate(texts):
        source = 999 if forks and start % size else -1
        table = array("i", range(number * 10, number * 10 + 10))
        ranges.append(QueryRange(sum(r.n for r in ranges), n, start, table, source))
        given = range(start - start % size if source >= 0 else start, start + n)  # tokens of the text
        for block, first in enumerate(range(0, 10 * size, size)):
            if first in given and first + size - 1 not in given:
                expected.append(table[block])
    assert BlockPlan(ranges, size).begun().tolist() == expected


@given(random=st.randoms(use_true_random=False), block_tokens=st.sampled_from([1, 4, 16, 64]))
def test_groups_hold_every_range_once_and_padding_at_most_doubles_what_is_gathered(
    random: Random, block_tokens: int
) -> None:
    ranges = some_ranges(random, block_tokens)
    plan = BlockPlan(ranges, block_tokens)
    groups = plan.groups(16)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(ranges)))
    for group in groups:
        rows, positions, tables = plan.padded(group)
        assert len(group) == 1 or tables.size <= 2 * plan.blocks[group].sum()
        for number, row, position, table in zip(group.tolist(), rows, positions, tables, strict=True):
            each, blocks = ranges[number], plan.blocks[number]
            assert row[: each.n].tolist() == list(range(each.begin, each.begin + each.n))
            assert set(row[each.n :].tolist()) <= {each.begin + each.n - 1}
            assert (position - row == each.start - each.begin).all()
            assert table[:blocks].tolist() == list(each.table[:blocks])
            assert set(table[blocks:].tolist()) <= {each.table[blocks - 1]}


def test_a_table_may_grow_after_a_plan_was_made_of_it() -> None:
    """An array whose memory is looked at cannot grow."""
    table = array("i", [4, 5])
    plan = BlockPlan([QueryRange(0, 3, 5, table)], 4)
    table.append(6)
    assert plan.indices.tolist() == [4, 5]


def test_arrays_that_go_together_arrive_as_they_were() -> None:
    from tests.worker.pretended import pretended

    given = [np.arange(6, dtype=np.int32).reshape(2, 3), [7, 8], np.empty((0, 2), np.int32), [9]]
    with pretended() as device:
        there = sent_together(given, torch.device("cuda", 0))
        assert device.counts["to device"] == 1
        assert device.counts["waits"] == 0
        assert [x.tolist() for x in there] == [[[0, 1, 2], [3, 4, 5]], [7, 8], [], [9]]
        assert {x.dtype for x in there} == {torch.int64}
