"""The drafts of a step: which of a drafter's proposals are verified, and when a drafter is not even asked."""

from collections.abc import Sequence

import pytest

from tests.worker.harness import Driver, Tiny
from tests.worker.test_exactness import TEXTS
from worker_service.engine.drafting.drafter import Ask, FirstOf, NoDrafter, Price
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.drafting.sparing import Sparing
from worker_service.engine.pass_costs import PassCosts
from worker_service.engine.types import Limits, Row, Run


class Sure(NoDrafter):
    """Drafts as many tokens as it has chances, for everybody."""

    def __init__(self, *chances: float) -> None:
        self.own, self.asked, self.prices = chances, 0, list[Price]()

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        self.asked += 1
        self.chances = [self.own[: ask.draft_len] for ask in asks]
        return [[7] * len(own) for own in self.chances]

    def price(self, price: Price) -> None:
        self.prices.append(price)


def first_round(tiny: Tiny, drafter: NoDrafter, costs: PassCosts | None) -> Row:
    driver = Driver(tiny.engine(drafter=drafter))
    driver.engine.weigh_drafts(costs)
    driver.admit("a", tiny.prompt(TEXTS[0]), Limits(max_tokens=40))
    while (row := driver.step([Run("a", 4, 64)])[0]).prefilled:
        continue
    return row


@pytest.mark.parametrize(
    ("row_s", "expected"),
    [pytest.param(0.0, 3, id="rows are free"), pytest.param(0.005, 2, id="dear"), pytest.param(0.02, 0, id="too dear")],
)
def test_of_a_drafters_proposals_those_are_verified_that_pay(tiny: Tiny, row_s: float, expected: int) -> None:
    assert first_round(tiny, Sure(0.9, 0.8, 0.2), PassCosts(0.01, row_s)).drafted == expected


def test_without_costs_all_proposals_are_verified(tiny: Tiny) -> None:
    assert first_round(tiny, Sure(0.9, 0.1, 0.01), None).drafted == 3


def test_a_drafter_is_told_the_price_before_it_is_asked(tiny: Tiny) -> None:
    drafter = Sure(0.9)
    first_round(tiny, drafter, PassCosts(0.01, 0.002))
    assert drafter.prices[-1].least == pytest.approx(0.2)


def test_chances_go_with_the_drafter_that_had_drafts() -> None:
    lookup, drafter = NgramDrafter(shortest=2), FirstOf(NgramDrafter(shortest=2), Sure(0.4, 0.2))
    asks = [Ask("found", [5, 6, 7, 5, 6], 2), Ask("not", [1, 2, 3], 2)]
    assert drafter.propose(asks) == [[7, 5], [7, 7]]
    lookup.propose(asks)
    assert [list(own) for own in drafter.chances] == [lookup.chances[0], [0.4, 0.2]]


def test_a_drafter_whose_drafts_do_not_pay_for_their_making_is_asked_now_and_then() -> None:
    drafter, asks = Sure(0.3), [Ask("a", [1], 4)]
    sparing = Sparing(drafter)
    sparing.price(Price(0.1, 0.5))
    answers = [sparing.propose(asks) for _ in range(640)]
    assert 20 <= drafter.asked < 60
    assert answers.count([[7]]) == drafter.asked
    assert answers[-2:] == [[[]], [[7]]]
    assert len(sparing.chances) == 1


def test_a_drafter_that_was_spared_is_asked_again_once_it_pays() -> None:
    drafter, asks = Sure(0.3), [Ask("a", [1], 4)]
    sparing = Sparing(drafter)
    sparing.price(Price(0.1, 0.5))
    for _ in range(100):
        sparing.propose(asks)
    sparing.price(Price(0.1, 0.01))
    for _ in range(640):
        sparing.propose(asks)
    drafter.asked = 0
    for _ in range(100):
        assert sparing.propose(asks) == [[7]]
    assert drafter.asked == 100
