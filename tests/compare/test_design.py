"""Which runs there are, in which order, and what each sends."""

from dataclasses import replace

import pytest

from laps_sd import own_prompts as own
from laps_sd.compare.design import BASE, Cell, Drawn, Run, check_load, due, runs
from laps_sd.compare.prompts import KINDS, digest, own_prompts
from tests.compare.builders import SETTINGS
from tests.prompts import templates, two_hundred

POLICIES = ["fcfs", "las", "laps-sd", "gittins"]


def order(slots: list[int], loads: list[str], repetitions: int) -> list[Run]:
    return list(runs({Cell(many, load): POLICIES for many in slots for load in loads}, repetitions, seed=1))


def test_the_capacity_comes_before_the_loads_that_are_shares_of_it() -> None:
    every = order([2, 4], ["0.85", "burst"], 2)
    for run in every:
        assert run.cell.load == "burst" or every.index(run.capacity) < every.index(run)
    assert len(set(every)) == 2 * 2 * 2 * 4


def test_without_a_burst_among_the_loads_only_the_capacity_is_one() -> None:
    bursts = [run for run in order([2], ["0.7"], 1) if run.cell.load == "burst"]
    assert bursts == [Run(Cell(2, "burst"), BASE, 1)]


@pytest.mark.parametrize("load", ["0.7", "burst"])
def test_policies_take_turns_in_another_order_each_repetition(load: str) -> None:
    turns = [run.policy for run in order([2], [load], 6) if run.cell.load == load]
    assert len({turns[i] for i in range(0, 24, 4)}) > 1


def test_every_policy_gets_the_same_requests_and_each_repetition_its_own() -> None:
    drawn = Drawn(own_prompts(), SETTINGS)
    assert drawn.requests(1) == Drawn(own_prompts()[::-1], SETTINGS).requests(1)
    assert drawn.requests(1) != drawn.requests(2)
    assert {planned.category for planned in drawn.requests(1)} == set(KINDS)


def test_what_is_taught_is_never_asked() -> None:
    drawn = Drawn(own_prompts(), SETTINGS)
    taught = {planned.prompt for planned in drawn.lesson()}
    assert len(taught) == SETTINGS.taught
    assert not taught & {planned.prompt for repetition in range(1, 30) for planned in drawn.requests(repetition)}


def test_a_paragraph_ends_an_answer_of_its_kinds_alone() -> None:
    stops = {planned.category: planned.stop for planned in Drawn(own_prompts(), SETTINGS).requests(1)}
    assert stops == {"chat": ("\n\n",), "code": (), "reasoning": ()}


def test_prompts_of_another_kind_or_text_are_others_in_any_order() -> None:
    some = own_prompts()[:3]
    changed = [replace(some[0], category="reasoning"), replace(some[0], text=some[0].text + " ")]
    assert digest(some[::-1]) == digest(some)
    assert all(digest([one, *some[1:]]) != digest(some) for one in changed)


def test_too_few_prompts_are_refused_by_kind() -> None:
    with pytest.raises(ValueError, match="only 700 prompts of kind 'chat'"):
        Drawn(own_prompts(), replace(SETTINGS, requests=2400))


def test_without_a_prompt_nothing_is_drawn() -> None:
    with pytest.raises(ValueError, match="no prompt of a kind"):
        Drawn([], SETTINGS)


def test_twice_the_load_halves_every_gap() -> None:
    slow, fast = (due(Run(Cell(2, load), "las", 1), 50, 3.0, seed=0) for load in ("0.4", "0.8"))
    assert slow == pytest.approx([2 * at_s for at_s in fast])
    assert due(Run(Cell(2, "burst"), "las", 1), 3, 3.0, seed=0) == [0.0] * 3


@pytest.mark.parametrize("text", ["", "fast", "0", "3", "nan"])
def test_a_load_is_a_share_of_the_capacity(text: str) -> None:
    with pytest.raises(ValueError, match="neither burst nor a share"):
        check_load(text)


def test_loads_have_one_spelling() -> None:
    assert [check_load(text) for text in ("0.850", ".7", "burst")] == ["0.85", "0.7", "burst"]


def test_prompts_that_heads_may_learn_from_share_no_template_with_those_they_are_tested_on() -> None:
    assert not templates() & {*own._CHAT, *own._CODE, *own._REASONING}
    assert not set(two_hundred()) & {text for _, text in own.texts()}
