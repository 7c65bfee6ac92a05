"""A lookup beside another drafter: what is verified where they agree, and where they do not."""

from collections.abc import Sequence

import pytest

from worker_service.engine.drafting.blended import Blended
from worker_service.engine.drafting.drafter import Ask, Chain, Drafter
from worker_service.engine.drafting.shielded import Shielded
from worker_service.engine.drafting.sparing import Sparing


class Says(Drafter):
    """For everybody these chains, the first of them as its proposal."""

    def __init__(self, *chains: Chain) -> None:
        self._chains, self.asked = chains, list[str]()

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        self.asked += [ask.request_id for ask in asks]
        first, *others = self._chains or [[]]
        self.positions = 1
        self.chances = [[chance for _, chance in first] for _ in asks]
        self.others = [others for _ in asks]
        return [[token for token, _ in first] for _ in asks]


def chains(drafter: Drafter) -> list[Chain]:
    """All that it has for one request, the likeliest first."""
    (drafts,) = drafter.propose([Ask("a", [1, 2, 3], 4)])
    (chances,), (others,) = drafter.chances, drafter.others
    return [chain for chain in (list(zip(drafts, chances, strict=True)), *others) if chain]


def approx(*own: Chain) -> list[list[object]]:
    return [[(token, pytest.approx(chance)) for token, chance in chain] for chain in own]


def test_where_both_say_the_same_it_is_likelier_than_what_one_says() -> None:
    blended = Blended(Says([(5, 0.5), (6, 0.2)]), Says([(5, 0.4), (7, 0.4)], [(8, 0.3)]))
    both = 0.35 + 0.65 * 0.4  # of what the lookup says, 0.7 counts
    assert chains(blended) == approx([(5, both), (7, both)], [(8, 0.65 * 0.3)])  # 7 is likelier after 5 than 6 is


def test_where_they_disagree_both_are_told_the_likelier_first() -> None:
    assert chains(Blended(Says([(5, 0.5), (6, 0.4)]), Says([(7, 0.4)]))) == approx(
        [(5, 0.35), (6, 0.28)], [(7, 0.65 * 0.4)]
    )
    assert chains(Blended(Says([(5, 0.3)]), Says([(7, 0.8)], [(5, 0.1)])))[0] == approx([(7, 0.79 * 0.8)])[0]


def test_where_a_lookup_is_sure_nobody_else_is_asked() -> None:
    other = Says([(7, 0.9)])
    blended = Blended(Says([(5, 0.8)]), other)
    assert chains(blended) == [[(5, 0.8)]]
    assert (other.asked, blended.positions) == ([], 0)


def test_a_chain_that_cannot_be_right_says_nothing() -> None:
    assert chains(Blended(Says([(5, 0.5)]), Says([(5, 0.0)], [(7, 0.0)]))) == [[(5, 0.5)]]


def test_where_one_has_nothing_the_other_counts_unchanged() -> None:
    assert chains(Blended(Says(), Says([(7, 0.4)], [(8, 0.2)]))) == [[(7, 0.4)], [(8, 0.2)]]
    assert chains(Blended(Says([(5, 0.5)]), Says())) == [[(5, 0.5)]]
    assert chains(Blended(Says(), Says())) == []


@pytest.mark.parametrize("wrapped", [Shielded, Sparing])
def test_other_chains_come_through_what_wraps_a_drafter(wrapped: type) -> None:
    assert chains(wrapped(Says([(5, 0.5)], [(6, 0.2)]))) == [[(5, 0.5)], [(6, 0.2)]]


def test_a_shield_leaves_out_other_chains_of_nobody_knows_whom() -> None:
    drafter = Says([(5, 0.5)], [(6, 0.2)])
    shielded = Shielded(drafter)
    shielded.propose([Ask("a", [1], 4)])
    assert shielded.others
    drafter.propose = lambda asks: [[5] for _ in asks]  # type: ignore[method-assign]  # of one round, and there are two
    assert shielded.propose([Ask("a", [1], 4), Ask("b", [1], 4)]) == [[5], [5]]
    assert not shielded.others


@pytest.mark.parametrize("strange", [[(6, None)], [("x", 0.2)], [6], None], ids=str)
def test_other_chains_that_are_none_cost_drafts_and_nothing_else(strange: object) -> None:
    shielded = Shielded(Says([(5, 0.5)], strange))  # type: ignore[arg-type]
    assert shielded.propose([Ask("a", [1], 4)]) == [[]]
    assert not shielded.others
