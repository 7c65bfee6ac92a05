"""A drafter that fails costs drafts: never the worker, and never a token."""

import logging
from collections.abc import Sequence

import pytest

from tests.worker.harness import Driver, Tiny
from worker_service.engine.drafting.drafter import Ask, Drafter, NoDrafter, Verified
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.types import Limits, Sampling

TEXTS = ["Once upon a time there was a queue. Once upon a time there was a", "lazy lazy lazy lazy"]
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=3)]


class Faulty(NgramDrafter):
    """As n-grams, but every third call of what `fault` names goes wrong."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.calls, self.faults = fault, 0, 0

    def _due(self, *names: str) -> bool:
        self.calls += self.fault in names
        due = self.fault in names and self.calls % 3 == 0
        self.faults += due
        return due

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        if self._due("propose raises"):
            raise KeyError(asks[0].tokens[0])
        drafts = super().propose(asks)
        if self._due("a list too few"):
            return drafts[:-1]
        if self._due("no list"):
            return [None for _ in asks]  # type: ignore[misc]
        if self._due("ids that are none"):
            return [[-5, 10**9, *own] for own in drafts]
        return drafts

    def expect(self, ask: Ask) -> None:
        if self._due("events raise"):
            raise ZeroDivisionError

    def verified(self, rounds: Sequence[Verified]) -> None:
        if self._due("events raise"):
            raise OSError("gone")

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        if self._due("events raise"):
            raise RuntimeError(request_id)


def texts(tiny: Tiny, drafter: Drafter, sampling: Sampling) -> dict[str, list[int]]:
    driver = Driver(tiny.engine(drafter=drafter))
    for i, text in enumerate(TEXTS):
        driver.admit(str(i), tiny.prompt(text), Limits(max_tokens=40), sampling)
    driver.finish_all()
    driver.forget_all()
    return driver.outputs


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("fault", ["propose raises", "a list too few", "no list", "ids that are none", "events raise"])
def test_a_drafter_that_fails_changes_no_text(tiny: Tiny, fault: str, sampling: Sampling) -> None:
    drafter = Faulty(fault)
    assert texts(tiny, drafter, sampling) == texts(tiny, NoDrafter(), sampling)
    assert drafter.faults >= 2


def test_a_failure_is_told_once_and_without_its_words(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    class Telling(NoDrafter):
        def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
            raise ValueError("what a client wrote")

    with caplog.at_level(logging.WARNING):
        texts(tiny, Telling(), Sampling())
    (message,) = [record.getMessage() for record in caplog.records]
    assert "ValueError at" in message
    assert "client wrote" not in message
