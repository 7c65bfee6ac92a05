"""What a drafter guesses after which text, and in which order; rollback, branches, room. On a model that recalls."""

from random import Random

import pytest

from tests.worker.drafting.recalling import (
    BLOCK_TOKENS,
    CONTEXT,
    FAN,
    Recalling,
    all_told,
    greedy,
    is_empty,
    learn,
    likeliest,
    passes,
    text,
)
from worker_service.drafting.texts import Guess, Name, Wish
from worker_service.engine.drafting.prefix import EMPTY, extended

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def test_a_chain_is_told_when_it_is_of_use_and_again_when_it_is_whole() -> None:
    drafting = passes()
    learn(drafting, 1, 0, PROMPT, Wish(need=3, ahead=7))
    at, digest, guesses = len(PROMPT), extended(EMPTY, PROMPT), greedy(PROMPT, 7)
    assert all_told(drafting) == [(1, Guess(at, digest, guesses[:3], False)), (1, Guess(at, digest, guesses, False))]


def test_a_truth_that_agrees_costs_one_pass_for_each_new_guess() -> None:
    model = Recalling()
    drafting = passes(model)
    learn(drafting, 1, 0, PROMPT, Wish(2, 4))
    all_told(drafting)
    model.passes.clear()
    truth = greedy(PROMPT, 3)
    learn(drafting, 1, len(PROMPT), truth, Wish(2, 4))
    told = all_told(drafting)
    assert model.passes == [[1]] * 3
    assert told[-1][1].tokens == greedy(PROMPT + truth, 4)


def test_after_a_truth_that_differs_the_chain_is_that_of_the_new_text() -> None:
    drafting = passes()
    learn(drafting, 1, 0, PROMPT, Wish(4, 9))
    all_told(drafting)
    right = greedy(PROMPT, 2)
    truth = [*right, (greedy(PROMPT, 3)[2] + 1) % 50]
    learn(drafting, 1, len(PROMPT), truth, Wish(4, 4))
    assert [guess.tokens for _, guess in all_told(drafting)] == [greedy(PROMPT + truth, 4)]


def test_a_truth_beyond_the_chain_and_one_that_goes_back_are_followed() -> None:
    drafting = passes()
    learn(drafting, 1, 0, PROMPT, Wish(2, 2))
    all_told(drafting)
    further = [*greedy(PROMPT, 2), 8, 8]
    learn(drafting, 1, len(PROMPT), further, Wish(2, 2))
    assert all_told(drafting)[-1][1].tokens == greedy(PROMPT + further, 2)
    learn(drafting, 1, 5, [7], Wish(2, 2))
    told = all_told(drafting)[-1][1]
    assert (told.at, told.prefix) == (6, extended(EMPTY, [*PROMPT[:5], 7]))
    assert told.tokens == greedy([*PROMPT[:5], 7], 2)


def test_what_was_true_is_the_guess_when_the_truth_goes_back() -> None:
    drafting = passes()
    learn(drafting, 1, 0, PROMPT, Wish(0, 0))
    told = learn(drafting, 1, 4, [], Wish(2, 3))
    assert told is not None
    assert told.tokens == PROMPT[4:7]


def test_a_chain_that_is_there_already_is_told_at_once_when_it_becomes_of_use() -> None:
    drafting = passes()
    learn(drafting, 1, 0, PROMPT, Wish(4, 7))
    for _ in range(6):
        drafting.run()  # a guess each; four were told
    guesses = greedy(PROMPT, 6)
    told = learn(drafting, 1, len(PROMPT), guesses[:1], Wish(4, 7))
    assert told is not None
    assert told.tokens == guesses[1:]


def test_branches_follow_what_else_was_likely_and_one_that_comes_true_needs_no_pass() -> None:
    drafting = passes()
    learn(drafting, 1, 0, PROMPT, Wish(need=2, ahead=4, fan=3, depth=3))
    chain, told = greedy(PROMPT, 4), [guess for _, guess in all_told(drafting)]
    branches = {(guess.at, guess.tokens[0]): guess for guess in told if guess.branch}
    expected = {(len(PROMPT) + n, other) for n in range(3) for other in likeliest(PROMPT + chain[:n])[1:3]}
    assert branches.keys() == expected
    for (at, first), guess in branches.items():
        before = (PROMPT + chain)[:at]
        assert guess.prefix == extended(EMPTY, before)
        assert guess.tokens == [first, *greedy([*before, first], 2)]
    other = likeliest(PROMPT + chain[:1])[1]
    assert learn(drafting, 1, len(PROMPT), [chain[0], other], Wish(2, 2)) is None  # the worker has it already
    assert drafting.run() is None
    assert text(drafting, 1).main.tokens[len(PROMPT) + 2 :].tolist() == greedy([*PROMPT, chain[0], other], 2)


def test_a_branch_that_comes_true_branches_where_its_own_guesses_may_be_wrong() -> None:
    drafting = passes()
    wish = Wish(need=2, ahead=5, fan=3, depth=3)
    learn(drafting, 1, 0, PROMPT, wish)
    all_told(drafting)
    truth = [*PROMPT, likeliest(PROMPT)[1]]
    learn(drafting, 1, len(PROMPT), truth[len(PROMPT) :], wish)
    branches = {(guess.at, guess.tokens[0]) for _, guess in all_told(drafting) if guess.branch}
    after = truth + greedy(truth, 2)
    assert branches == {(at, other) for at in range(12, 15) for other in likeliest(after[:at])[1:3]}


def test_who_has_no_usable_chain_comes_first_then_who_waited_longest_then_branches() -> None:
    drafting = passes(lines=1)
    learn(drafting, 1, 0, [1], Wish(1, 2, fan=2, depth=2))
    learn(drafting, 2, 0, [2], Wish(1, 2))
    learn(drafting, 3, 0, [3], Wish(2, 3))
    told = [(handle, len(guess.tokens), guess.branch) for handle, guess in all_told(drafting)]
    mains = [each for each in told if not each[2]]
    assert mains == [(1, 1, False), (2, 1, False), (3, 2, False), (1, 2, False), (2, 2, False), (3, 3, False)]
    assert told[len(mains) :] == [(1, 2, True)] * 2


def test_a_text_that_is_to_be_kept_is_computed_and_nothing_is_guessed() -> None:
    model = Recalling()
    drafting = passes(model)
    learn(drafting, 1, 0, PROMPT, Wish(0, 0))
    assert all_told(drafting) == []
    assert model.passes == [[len(PROMPT) - 1]]
    learn(drafting, 1, len(PROMPT), [], Wish(1, 1))
    assert [guess.tokens for _, guess in all_told(drafting)] == [greedy(PROMPT, 1)]
    assert model.passes[1:] == [[1]]


def test_a_chain_ends_where_the_context_does() -> None:
    drafting = passes()
    whole = PROMPT * 5
    learn(drafting, 1, 0, whole, Wish(8, 8))
    assert [guess.tokens for _, guess in all_told(drafting)] == [greedy(whole, CONTEXT - len(whole))]


@pytest.mark.parametrize(("salts", "shared"), [(("a", "a"), True), (("a", "b"), False)])
def test_equal_prompts_share_kv_under_one_salt_alone(salts: tuple[str, str], shared: bool) -> None:
    model = Recalling()
    drafting = passes(model)
    for handle, salt in enumerate(salts, 1):
        learn(drafting, handle, 0, PROMPT, Wish(1, 1), salt)
        all_told(drafting)
    assert bool(set(text(drafting, 1).main.kv.table) & set(text(drafting, 2).main.kv.table)) == shared
    assert sum(map(sum, model.passes)) == 2 * len(PROMPT) - (2 * BLOCK_TOKENS if shared else 0)


def test_idle_kv_goes_first_and_comes_back_when_its_text_does() -> None:
    drafting = passes(blocks=15)
    for handle in range(1, 5):  # 5 blocks each
        learn(drafting, handle, 0, [handle] * 17, Wish(2, 2))
        assert all_told(drafting)[-1][1].tokens == greedy([handle] * 17, 2)
    assert text(drafting, 1).main.kv.blocks == 0
    assert all(text(drafting, handle).main.kv.blocks for handle in (2, 3, 4))
    new = greedy([1] * 17, 1)
    learn(drafting, 1, 17, new, Wish(2, 2))
    assert all_told(drafting)[-1][1].tokens == greedy([1] * 17 + new, 2)
    assert text(drafting, 2).main.kv.blocks == 0


def test_more_texts_than_fit_are_all_served_one_after_the_other() -> None:
    drafting = passes(blocks=15)
    for handle in range(1, 9):
        learn(drafting, handle, 0, [handle] * 30, Wish(3, 6, fan=FAN, depth=2))
    mains = {handle: guess.tokens for handle, guess in all_told(drafting) if not guess.branch}
    assert mains == {handle: greedy([handle] * 30, 6) for handle in range(1, 9)}


def test_a_forgotten_session_leaves_the_others_alone_and_no_kv() -> None:
    drafting = passes()
    learn(drafting, 1, 0, PROMPT, Wish(2, 4, fan=3, depth=2))
    learn(drafting, 1, 0, PROMPT, Wish(2, 4), session=2)
    drafting.run()
    drafting.run()
    drafting.texts.forget_all(1)
    assert [guess.tokens for _, guess in all_told(drafting)][-1] == greedy(PROMPT, 4)
    drafting.texts.forget(Name(2, 1))
    assert is_empty(drafting)


@pytest.mark.parametrize("seed", range(5))
def test_a_thousand_random_steps_yield_right_guesses_and_leave_no_kv(seed: int) -> None:
    random, drafting = Random(seed), passes(lines=5)
    truths: dict[int, list[int]] = {}
    former: dict[int, list[list[int]]] = {}  # what was true before the truth went back

    def check(handle: int, guess: Guess) -> None:
        truth = truths[handle]
        before = (truth + text(drafting, handle).main.tokens[len(truth) :].tolist())[: guess.at]
        assert guess.prefix == extended(EMPTY, before)
        assert guess.branch or guess.at == len(truth)
        for place, token in enumerate(guess.tokens, guess.at):
            choice = likeliest(before)[1:] if guess.branch and place == guess.at else likeliest(before)[:1]
            assert token in choice or any(was[: place + 1] == [*before, token] for was in former.get(handle, []))
            before = [*before, token]

    for _ in range(1000):
        handle = random.randrange(1, 7)
        truth = truths.get(handle)
        if truth is None or random.random() < 0.03 or len(truth) > CONTEXT - 10:
            drafting.texts.forget(Name(1, handle))
            former.pop(handle, None)
            truth, start, new = [], 0, [random.randrange(2) for _ in range(random.randrange(1, 30))]
        else:
            start, chain = len(truth), text(drafting, handle).main.tokens[len(truth) :].tolist()
            new = chain[: random.randrange(6)]
            if random.random() < 0.5:
                new = [*new, random.choice(likeliest(truth + new))]
            if random.random() < 0.05:
                former.setdefault(handle, []).append(truth + chain)
                start, new = random.randrange(1, len(truth) + 1), new[:1]
        truths[handle] = truth[:start] + new
        need = random.randrange(5)
        wish = Wish(need, need + random.randrange(5), random.randrange(FAN + 1), random.randrange(4))
        guess = learn(drafting, handle, start, new, wish, salt=str(handle % 2))
        if guess is not None:
            check(handle, guess)
        for _ in range(random.randrange(4)):
            for name, made in drafting.run() or []:
                check(name.handle, made)
    for handle, made in all_told(drafting):
        check(handle, made)
    for handle in truths:
        drafting.texts.forget(Name(1, handle))
    assert is_empty(drafting)
