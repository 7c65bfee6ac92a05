"""Chains from a drafter elsewhere: whatever comes, and in whatever order, only what follows the text is proposed."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker_service.engine.drafting import remote
from worker_service.engine.drafting.prefix import EMPTY, extended
from worker_service.engine.drafting.remote import MOST_CHAINS, MOST_TOKENS, WINDOW, Chain, Chains

TOKENS = st.lists(st.integers(0, 2), max_size=6)  # few ids: texts often agree for a while


def chain(text: Sequence[int], guesses: Sequence[int]) -> Chain:
    """As an honest drafter would send it that knew `text`."""
    return Chain(len(text), extended(EMPTY, text), guesses)


@st.composite
def interleavings(draw: st.DrawFn) -> list[tuple[str, list[int], list[int]]]:
    """A text that grows, and chains that follow its beginnings, longer texts than there are yet, or other texts."""
    steps: list[tuple[str, list[int], list[int]]] = []
    truth: list[int] = []
    for _ in range(draw(st.integers(1, 25))):
        if draw(st.booleans()):
            more = draw(TOKENS)
            steps.append(("truth", more, []))
            truth += more
        else:
            of = truth[: draw(st.integers(0, len(truth)))] + draw(TOKENS)
            if of and draw(st.booleans()):
                place = draw(st.integers(0, len(of) - 1))
                of[place] = draw(st.integers(0, 2))
            steps.append(("chain", of, draw(TOKENS)))
    return steps


def against_the_truth(steps: Sequence[tuple[str, list[int], list[int]]]) -> list[list[int]]:
    """Runs the steps, and returns the proposals that no chain makes whose own text is the truth so far."""
    store, truth, wrong = Chains(), list[int](), list[list[int]]()
    sent: list[list[int]] = []
    for what, first, second in steps:
        if what == "truth":
            truth += first
        else:
            store.add(chain(first, second))
            sent.append([*first, *second])
        proposed = store.longest(truth)
        if proposed and [*truth, *proposed] not in sent:
            wrong.append(proposed)
    return wrong


@settings(max_examples=400, deadline=None)
@given(interleavings())
def test_no_interleaving_of_truths_and_chains_yields_a_chain_against_the_truth(
    steps: list[tuple[str, list[int], list[int]]],
) -> None:
    assert against_the_truth(steps) == []


def test_without_digests_the_property_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "extended", lambda digest, tokens: EMPTY)  # every text has the same one
    monkeypatch.setitem(chain.__globals__, "extended", lambda digest, tokens: EMPTY)
    with pytest.raises(AssertionError):
        test_no_interleaving_of_truths_and_chains_yields_a_chain_against_the_truth()


@settings(max_examples=200, deadline=None)
@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=12), guesses=st.lists(st.integers(0, 2), min_size=1))
def test_a_chain_serves_for_as_long_as_the_text_goes_its_way(text: list[int], guesses: list[int]) -> None:
    store = Chains()
    for known in range(len(guesses)):
        store.add(chain(text, guesses))  # again and again: repeated messages change nothing
        assert store.longest([*text, *guesses[:known]]) == guesses[:MOST_TOKENS][known:]
    other = [*text, *guesses[:-1], 7]
    assert store.longest(other) == []


def test_the_longest_serves_of_those_that_say_the_same() -> None:
    store = Chains()
    for guesses in ([1], [2, 3, 4], [1, 5], [1, 6, 7]):
        store.add(chain([9], guesses))
    assert store.longest([9]) == [1, 5]
    assert store.longest([9, 2]) == [3, 4]


def test_a_second_guess_waits_until_the_first_is_wrong_however_long_it_is() -> None:
    store = Chains()
    store.add(chain([9], [1, 2, 3]))  # the main chain
    store.add(chain([9], [4, 4, 4, 4]))  # and branches: for an outcome that differs at once,
    store.add(chain([9, 1], [5, 5, 5, 5]))  # or one later
    assert store.longest([9]) == [1, 2, 3]
    assert store.longest([9, 1]) == [2, 3]
    assert store.longest([9, 1, 5]) == [5, 5, 5]


def test_a_chain_behind_a_longer_text_waits_for_it() -> None:
    store = Chains()
    store.add(chain([1, 2, 3], [4]))
    assert store.longest([1]) == []
    assert store.longest([1, 2, 3]) == [4]


def test_what_is_kept_is_bounded() -> None:
    store, text = Chains(), list(range(5000))
    for number in range(10 * MOST_CHAINS):
        store.add(Chain(number, 0, range(10**5)))
    assert len(store._chains) == MOST_CHAINS
    assert all(len(kept.tokens) == MOST_TOKENS for kept in store._chains)
    for length in (10, 11, 4000, 5000):
        store.longest(text[:length])
        assert len(store._digests) <= WINDOW + 1
    store.add(chain(text[: 5000 - WINDOW], [*text[5000 - WINDOW :], 7]))
    assert store.longest(text) == []  # the chain was cut where the text ends
    store.add(chain(text[:4990], [*text[4990:], 7]))
    assert store.longest(text) == [7]
    assert store.longest([*text, *[7] * WINDOW]) == []
    assert store._chains == []


class Copied(list[int]):
    """Counts the tokens that are copied out of it."""

    copied = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.copied += len(found) if isinstance(key, slice) else 0
        return found


def test_chains_of_a_long_text_that_never_fit_cost_no_copy_of_it() -> None:
    store, text = Chains(), Copied(range(30_000))
    store.longest(text)
    text.copied = 0
    for number in range(MOST_CHAINS):
        store.add(Chain(number, 0, range(MOST_TOKENS)))
    assert store.longest(text) == []
    assert text.copied == 0
