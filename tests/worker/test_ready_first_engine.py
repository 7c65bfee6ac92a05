"""Ready-first in the engine: steps, rows and texts, with a drafter whose chains are late when the test says so."""

from collections.abc import Sequence

from tests.worker.harness import Driver, Tiny
from worker_service.engine.drafting.drafter import Ask, Drafter
from worker_service.engine.types import Elsewhere, Limits, Run, Skip


class Late(Drafter):
    """Drafts nothing; `slow` are late."""

    elsewhere = Elsewhere(0.0, 0.001, 0.5, 8)

    def __init__(self) -> None:
        self.slow: dict[str, bool] = {}
        self.asked: list[Ask] = []

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        self.asked = list(asks)
        return [[] for _ in asks]

    def late(self, asks: Sequence[Ask]) -> dict[str, bool]:
        return {ask.request_id: self.slow[ask.request_id] for ask in asks if ask.request_id in self.slow}


def driver_of(tiny: Tiny, drafter: Drafter, names: str = "abc") -> Driver:
    driver = Driver(tiny.engine(drafter=drafter))
    for name in names:
        driver.admit(name, tiny.prompt("The quick brown fox"), Limits(max_tokens=12, ignore_eos=True))
    for name in names:
        driver.step([Run(name, 0, 64)])
    return driver


def outcome(driver: Driver, runs: list[Run], slots: int) -> dict[str, Skip | None]:
    return {row.request_id: row.skipped for row in driver.engine.step(runs, slots).rows}


def test_one_that_is_ready_runs_in_the_place_of_one_whose_drafts_are_due_and_the_row_says_so(tiny: Tiny) -> None:
    drafter = Late()
    driver = driver_of(tiny, drafter)
    drafter.slow = {"a": True}
    runs = [Run(name, 2, 64, yields=True) for name in "abc"]
    assert outcome(driver, runs, 2) == {"b": None, "c": None, "a": Skip.DEFERRED}
    assert outcome(driver, runs, 2) == {"a": None, "b": None}  # c was ready, so it is preempted


def test_who_may_not_be_passed_over_is_not(tiny: Tiny) -> None:
    drafter = Late()
    driver = driver_of(tiny, drafter)
    drafter.slow = {"a": True}
    assert outcome(driver, [Run(name, 2, 64) for name in "abc"], 2) == {"a": None, "b": None}


def test_one_that_lets_another_go_first_runs_after_all_where_that_one_finds_no_memory(tiny: Tiny) -> None:
    drafter = Late()
    driver = driver_of(tiny, drafter, "ab")
    while not own_room(driver, "a"):
        driver.step([Run("a", 0, 64)])
    driver.engine.drop("b")
    fill(driver)
    drafter.slow = {"a": True}
    assert outcome(driver, [Run(name, 2, 64, yields=True) for name in "ab"], 1) == {"a": None, "b": Skip.NO_BLOCKS}


def test_one_that_waits_for_memory_is_not_told_to_wait_for_drafts_too(tiny: Tiny) -> None:
    drafter = Late()
    driver = driver_of(tiny, drafter, "ab")
    driver.step([Run("a", 0, 64)])
    while own_room(driver, "a"):
        driver.step([Run("a", 0, 64)])
    fill(driver)
    drafter.slow = {"a": True, "b": True}
    rows = driver.step([Run(name, 2, 64, yields=True) for name in "ab"], 1)
    assert [(row.request_id, row.skipped) for row in rows] == [("a", Skip.NO_BLOCKS)]


def own_room(driver: Driver, name: str) -> int:
    """Tokens that the request can add in the blocks that it has."""
    return driver.engine._requests[name].kv.own_room


def fill(driver: Driver) -> None:
    for _ in range(driver.engine.free_blocks):
        driver.engine.pool.take()


def test_chains_that_go_to_others_are_not_asked_for(tiny: Tiny) -> None:
    drafter = Late()
    driver = driver_of(tiny, drafter, "ab")
    driver.engine.step([Run("a", 2, 64, here=True), Run("b", 2, 64)], 2)
    assert {ask.request_id: ask.local for ask in drafter.asked} == {"a": True, "b": False}


def test_what_drafts_from_elsewhere_cost_comes_with_each_step(tiny: Tiny) -> None:
    driver = driver_of(tiny, Late(), "a")
    assert driver.engine.step([Run("a", 2, 64)], 1).elsewhere == Late.elsewhere


def test_texts_are_what_they_are_without(tiny: Tiny) -> None:
    plain, drafter = driver_of(tiny, Late()), Late()
    mixed = driver_of(tiny, drafter)
    texts = []
    for driver, yields in ((plain, False), (mixed, True)):
        for number in range(60):
            drafter.slow = {"a": True} if number % 3 else {"b": True, "a": number % 2 == 0}
            driver.step([Run(name, 2, 64, yields=yields) for name in "abc"], slots=2)
        texts.append(driver.outputs)
    assert texts[0] == texts[1]
    assert all(len(text) == 12 for text in texts[1].values())
