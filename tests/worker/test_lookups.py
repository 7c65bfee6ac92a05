"""Lookups of n-grams: what they draft, in which order with another drafter, and at which price."""

from collections.abc import Sequence

import pytest

from worker_service.drafters import behind_lookup
from worker_service.engine.drafting.drafter import Ask, Drafter, NoDrafter, Price
from worker_service.engine.drafting.ngram import NgramDrafter


def propose(drafter: Drafter, tokens: list[int], draft_len: int, request_id: str = "a") -> list[int]:
    return drafter.propose([Ask(request_id, tokens, draft_len)])[0]


def test_ngram_drafts_follow_the_most_recent_longest_match() -> None:
    drafter = NgramDrafter()
    assert propose(drafter, [1, 2, 3, 9, 1, 2, 3, 8, 7, 2, 3], 2) == [8, 7]
    assert propose(drafter, [1, 2, 3, 9, 1, 2, 3, 8, 7, 2, 3, 55], 2) == []
    assert propose(NgramDrafter(), [1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3], 1) == [9]  # of three tokens, before two


def test_ngram_drafts_go_on_repeating_past_the_end() -> None:
    assert propose(NgramDrafter(), [9, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_the_dearer_drafts_are_the_more_tokens_must_match_for_each_of_an_ngram() -> None:
    text = [*range(1, 20), 50]

    def drafts(least: float) -> list[int]:
        """How many of at most 9, by the number of tokens that match."""
        drafter = NgramDrafter(longest=6)
        drafter.price(Price(least))
        return [len(propose(drafter, [*text, *range(9 - n, 9)], 9, f"{n}")) for n in range(1, 8)]

    assert drafts(0.0) == [9] * 7
    assert drafts(0.3) == [0, 2, 3, 4, 5, 9, 9]
    assert drafts(0.6) == [0, 0, 1, 1, 2, 6, 6]
    assert drafts(1.0) == [0] * 7


def test_ngram_drafts_of_a_request_do_not_come_from_another_nor_from_tokens_forgotten() -> None:
    drafter = NgramDrafter()
    assert propose(drafter, [1, 2, 3, 1], 1) == [2]
    assert propose(drafter, [3, 1], 1, request_id="b") == []
    drafter.forget("a")
    assert propose(drafter, [3, 1], 1) == []


class Guesses(NoDrafter):
    """Drafts the same for every request."""

    def __init__(self, *guesses: int) -> None:
        self._guesses = guesses

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [list(self._guesses) for _ in asks]


@pytest.mark.parametrize(
    ("tokens", "guesses", "expected"),
    [
        ([7, 8, 9, 5, 7, 8], (1,), [9, 5]),  # two tokens match
        ([8, 9, 5, 7, 8], (1,), [1]),  # one
        ([8, 9, 5, 7, 8], (), [9, 5]),
    ],
    ids=["two tokens match", "one matches", "one matches, and there is no guess"],
)
def test_what_followed_two_tokens_goes_before_a_drafters_guess_and_what_followed_one_after(
    tokens: list[int], guesses: tuple[int, ...], expected: list[int]
) -> None:
    drafter = behind_lookup(Guesses(*guesses))
    drafter.price(Price(0.1))
    assert [drafts[:2] for drafts in drafter.propose([Ask("a", tokens, 4)])] == [expected]


def test_a_lookup_reads_a_long_text_from_its_end_on_step_by_step() -> None:
    """To read all of it at first sight would hold up everybody's step."""

    def drafts(drafter: NgramDrafter, text: Sequence[int], name: str = "a") -> list[int]:
        (proposed,) = drafter.propose([Ask(name, text, 2)])
        return proposed

    def lookup() -> NgramDrafter:
        return NgramDrafter(longest=3, shortest=2)

    near, far, drafter = [1, 2, 3, *range(100, 16_000)], [1, 2, 3, *range(100, 40_000)], lookup()
    assert drafts(drafter, [*near, 1, 2]) == [3, 100]
    assert drafts(drafter, [*near, 1, 2, *range(50_000, 60_000), 2, 3]) == [100, 101]  # what it knows it keeps
    assert drafts(lookup(), [*far, 39_997, 39_998]) == [39_999, 39_997]
    later = lookup()
    assert [drafts(later, [*far, 1, 2]) for _ in range(13)] == [*[[]] * 11, *[[3, 100]] * 2]
    assert drafts(later, [*far, 1, 2, 1, 2]) == [1, 2]  # the newest counts, whenever it was read
    twice = [*range(20_000), 303, 304, 7, 8, *range(50_000, 70_000), 303, 304]
    assert [drafts(later, twice, "b") for _ in range(13)] == [[], *[[7, 8]] * 12]
    both, asks = lookup(), [Ask(name, [*far, 1, 2], 2) for name in "cd"]
    assert [both.propose(asks) for _ in range(24)][-2:] == [[[3, 100], []], [[3, 100], [3, 100]]]
