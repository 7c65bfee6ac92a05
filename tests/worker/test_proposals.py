"""The drafts of a step: which of a drafter's proposals are verified, and when a drafter is not even asked."""

from collections.abc import Sequence

import pytest

from protos.structure import grammar
from protos.v1.types_pb2 import Structure
from tests.worker.harness import Driver, Tiny
from tests.worker.test_exactness import TEXTS
from worker_service.engine.drafting.drafter import ALL, Ask, FirstOf, NoDrafter, Price
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.drafting.sparing import Sparing
from worker_service.engine.pass_costs import PassCosts
from worker_service.engine.types import Limits, Row, Run, Sampling


class Sure(NoDrafter):
    """Drafts as many tokens as it has chances, for everybody."""

    def __init__(self, *chances: float) -> None:
        self.own, self.asked, self.asked_at = chances, 0, list[Price]()
        self._price = ALL

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        self.asked += 1
        self.asked_at += [self._price] if asks else []
        self.positions = 1
        self.chances = [self.own[: ask.draft_len] for ask in asks]
        return [[7] * len(own) for own in self.chances]

    def price(self, price: Price) -> None:
        self._price = price


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
    assert drafter.asked_at == [Price(pytest.approx(0.2), 0.0)]


def test_of_equally_likely_drafts_no_more_are_verified_than_pay(tiny: Tiny) -> None:
    costs, driver = PassCosts(0.01, 0.0), Driver(tiny.engine(drafter=Sure(0.5, 0.5)))
    for _ in range(500):
        for rows in range(2, 7):
            costs.observe(rows, 0.01 if rows <= 3 else 0.03, 0.0, 0.0)  # three rows cost as one; the next is dear
    driver.engine.weigh_drafts(costs)
    for name, text in zip("ab", TEXTS, strict=False):
        driver.admit(name, tiny.prompt(text), Limits(max_tokens=40))
    runs = [Run(name, 4, 64) for name in "ab"]
    rows = driver.step(runs)
    while any(row.prefilled for row in rows):
        rows = driver.step(runs)
    assert sorted(row.drafted for row in rows) == [0, 1]


def test_chances_go_with_the_drafter_that_had_drafts() -> None:
    lookup, drafter = NgramDrafter(shortest=2), FirstOf(NgramDrafter(shortest=2), Sure(0.4, 0.2))
    asks = [Ask("found", [5, 6, 7, 5, 6], 2), Ask("not", [1, 2, 3], 2)]
    assert drafter.propose(asks) == [[7, 5], [7, 7]]
    lookup.propose(asks)
    assert [list(own) for own in drafter.chances] == [lookup.chances[0], [0.4, 0.2]]


def spared(drafter: Sure, price: Price, rounds: int) -> tuple[Sparing, int]:
    """After so many rounds at this price, and how often the drafter was asked in the later half."""
    sparing = Sparing(drafter)
    sparing.price(price)
    for i in range(rounds):
        if i == rounds // 2:
            drafter.asked = 0
        sparing.propose([Ask("a", [1], 4)])
    return sparing, drafter.asked


def test_a_drafter_whose_drafts_do_not_pay_for_their_making_is_not_asked() -> None:
    sparing, asked = spared(Sure(0.3), Price(0.1, 0.5), 100)
    assert asked == 0
    assert (sparing.propose([Ask("a", [1], 4)]), sparing.chances, sparing.positions) == ([[]], (), 0)
    assert spared(Sure(0.3), Price(0.1, 0.15), 100)[1] == 50


@pytest.mark.parametrize("price", [Price(0.1, 0.01), ALL])
def test_a_drafter_that_was_spared_is_asked_once_it_costs_less(price: Price) -> None:
    drafter = Sure(0.3)
    sparing, _ = spared(drafter, Price(0.1, 0.5), 100)
    sparing.price(price)
    assert [sparing.propose([Ask("a", [1], 4)]) for _ in range(100)] == [[[7]]] * 100


def test_a_drafter_that_is_asked_to_see_what_has_changed_is_judged_by_what_it_costs_else() -> None:
    drafter = Sure(0.3)
    sparing, _ = spared(drafter, Price(0.1, 0.5), 100)
    for _ in range(20):
        sparing.price(Price(0.1, 0.0))
        assert sparing.propose([Ask("a", [1], 4)]) == [[7]]
        sparing.price(Price(0.1, 0.5))
        assert sparing.propose([Ask("a", [1], 4)]) == [[]]


def test_a_drafter_whose_drafts_pay_is_not_spared_for_the_long_chains_that_it_makes_where_they_cost_nothing() -> None:
    class Long(Sure):
        def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
            drafts = super().propose(asks)
            self.positions = 2 if self._price.position > 0 else 8
            return drafts

    drafter = Long(0.9, 0.2)
    sparing, _ = spared(drafter, Price(0.5, 0.15), 10)
    for _ in range(50):
        sparing.price(Price(0.1, 0.0))
        sparing.propose([Ask("a", [1], 4)])
        sparing.price(Price(0.5, 0.15))
        assert sparing.propose([Ask("a", [1], 4)]) == [[7, 7]]


def test_a_drafter_that_answers_too_little_costs_no_step(tiny: Tiny) -> None:
    class Short(Sure):
        def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
            drafts = super().propose(asks)[1:]
            self.chances = self.chances[1:]
            return drafts

    assert first_round(tiny, Short(0.9), PassCosts(0.01, 0.0)).tokens


def test_what_a_grammar_forces_after_a_draft_is_as_likely_as_that_draft(tiny: Tiny) -> None:
    """The drafts that the grammar takes away are not right, and their chances say nothing of what it forces instead."""

    class Spelled(Sure):
        def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
            super().propose(asks)
            return [spelled[: len(own)] for own in self.chances]

    (a,), (b,) = tiny.prompt("a"), tiny.prompt("b")
    spelled = [a, b, b, b]
    driver = Driver(tiny.engine(drafter=Spelled(0.9, 0.01, 0.01, 0.01)))
    driver.engine.weigh_drafts(PassCosts(0.01, 0.005))
    sampling = Sampling(grammar=grammar(Structure(regex="[ac][ac]aaaaaaaa")))
    driver.admit("a", tiny.prompt(TEXTS[0]), Limits(max_tokens=40), sampling)
    driver.finish_all(draft_len=lambda _: 4)
    first = next(row for row in driver.rows if row.drafted)
    assert first.drafted > 1
