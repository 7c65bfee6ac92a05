"""Recorded answers, served again, are told as they were recorded, and the order of both is decided alike each time."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from laps_sd_vllm import advice
from tests.vllm.answers import LESSONS, MOST, answers, drawn, lessons
from tests.vllm.replay import Order, Replay, compared
from worker_service.engine.types import CostProfile as Measured

FEW = 30


@pytest.fixture
def short(tmp_path: Path) -> Replay:
    """Of memory."""
    return Replay("KV of 4 long requests", (1.0, 0.01), tmp_path)


@pytest.mark.parametrize("order", [Order(), Order({}), Order({}, exact=True)], ids=["stock", "learned", "exact"])
def test_every_answer_ends_where_it_did(short: Replay, order: Order) -> None:
    draws = drawn(FEW, 3)
    run, _ = short.serve(order, draws, [0.0] * FEW)
    assert [each.tokens for each in run.served] == [each.tokens for each in draws]


def test_without_foresight_more_tokens_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "START", Measured(0.0, 1.0, 0.05, 0.05, 0.05))  # what steps cost is known
    dear, draws = Replay("KV of 4 long requests", (1.0, 0.05), tmp_path), lessons()
    with_it, without = (
        dear.serve(Order({}, True, foresight), draws, [0.0] * len(draws))[1] for foresight in (True, False)
    )
    assert with_it < without


def test_two_replays_are_the_same(short: Replay) -> None:
    one, other = (compared(short, Order({}, exact=True), 1.0, 5, FEW) for _ in range(2))
    assert one == other


def test_where_memory_is_short_tokens_are_computed_again(short: Replay) -> None:
    draws = lessons()
    assert short.serve(Order(), draws, [0.0] * len(draws))[1] > 0


def test_beside_it_stands_what_room_for_all_would_give(short: Replay) -> None:
    assert compared(short, Order({}, exact=True), 1.0, 5, FEW)["room"] < 1


def test_lessons_are_of_other_answers_than_those_that_are_compared() -> None:
    taught = set(map(id, lessons()))
    assert not taught & set(map(id, drawn(400, 1)))
    assert len(answers()) > LESSONS + 400
    assert all(0 < each.tokens <= each.most <= MOST for each in answers())
