"""The drafter that is elsewhere, on a post and a clock of the test's own: what is told, and for how long it waits."""

from math import inf
from typing import Any

import pytest

from tests.worker.office import HIDDEN, PASS_S, USUAL, Office, Table
from worker_service.engine.drafting.drafter import Ask, Verified
from worker_service.engine.drafting.prefix import EMPTY, extended
from worker_service.engine.drafting.remote import Chain
from worker_service.engine.drafting.remote_drafter import (
    MESSAGE_TOKENS,
    WIDE_TOKENS,
    Drafts,
    Gone,
    Refused,
    Welcome,
)
from worker_service.engine.drafting.worth import LEAST_CHANCE, PROBE_ROUNDS, Worth


def test_each_pass_is_one_message_with_what_is_new_of_each_request() -> None:
    table = Table(Office())
    table.admit("a")
    table.admit("b", [7])
    for _ in range(3):
        table.step()
    first, second, *passes = table.office.sent
    assert [(row.start, row.tokens) for row in [*first, *second]] == [(0, [5, 6]), (0, [7])]
    assert [[(row.start, row.tokens) for row in rows] for rows in passes] == [
        [(2, [1]), (1, [1])],
        [(3, [1]), (2, [1])],
        [(4, [1]), (3, [1])],
    ]


def test_what_has_come_is_proposed_and_nothing_is_waited_for() -> None:
    table = Table(Office(delay_s=PASS_S / 2, guesses=[1, 1, 9]))
    table.admit("a")
    table.office.time_s += PASS_S
    assert table.step() == [[1, 1, 9]]
    assert table.drafter.drafted == 3
    assert table.drafter.accepted == 2
    assert table.waits_s == [0.0]


def test_guesses_that_were_not_verified_are_not_judged_but_for_the_one_that_a_pass_decides() -> None:
    """A step may verify fewer than are proposed."""
    table = Table(Office(delay_s=PASS_S / 2, guesses=[1, 1, 1, 9]))
    table.admit("a")
    table.office.time_s += PASS_S
    assert table.drafter.propose([Ask("a", table.texts["a"], 4)]) == [[1, 1, 1, 9]]
    table.texts["a"] += [1, 1]  # one of them was verified, and the target's own token came after it
    table.drafter.verified([Verified("a", table.texts["a"], HIDDEN)])
    assert (table.drafter.drafted, table.drafter.accepted) == (2, 2)


def test_a_wait_is_worth_it_where_guesses_come_within_half_a_pass() -> None:
    table = Table(Office(delay_s=0.3 * PASS_S))
    table.admit("a")
    drafts = [table.step() for _ in range(20)]
    assert all(own for (own,) in drafts[3:])
    assert table.waits_s[-1] == pytest.approx(0.3 * PASS_S)


@pytest.mark.parametrize("delay", [0.6, 0.9, 30])
def test_what_takes_longer_is_not_waited_for_but_taken_when_it_comes(delay: float) -> None:
    table = Table(Office(delay_s=delay * PASS_S, guesses=[1] * 60))
    table.admit("a")
    drafts = [table.step() for _ in range(100)]
    assert max(table.waits_s) == 0.0
    assert sum(bool(own) for (own,) in drafts) > 20


def test_a_death_costs_two_half_passes() -> None:
    office = Office(delay_s=0.3 * PASS_S)
    table = Table(office)
    table.admit("a")
    for _ in range(20):
        table.step()
    office.delay_s, office.coming = inf, []
    waited = len(table.waits_s)
    for _ in range(50):
        table.step()
    vain = table.waits_s[waited:]
    assert sum(vain) == pytest.approx(2 * PASS_S / 2)
    assert max(vain) == pytest.approx(PASS_S / 2)
    office.delay_s = 0.3 * PASS_S  # it is back
    drafts = [table.step() for _ in range(5)]
    assert all(own for (own,) in drafts[2:])


@pytest.mark.parametrize("useless", [{"behind": 3}, {"lies": 1}, {"behind": 1, "delay_s": 0.45 * PASS_S}])
def test_whoever_talks_and_brings_nothing_is_waited_for_no_longer_than_the_dead(useless: dict[str, Any]) -> None:
    office = Office(delay_s=0.3 * PASS_S)
    table = Table(office)
    table.admit("a")
    for _ in range(20):
        table.step()
    for name, value in ({"guesses": [2] * 4} | useless).items():
        setattr(office, name, value)
    table.step()  # a good chain was on its way
    table.waits_s.clear()
    for _ in range(60):
        table.step()
    assert sum(table.waits_s) <= 2 * PASS_S / 2 + 1e-9


@pytest.mark.parametrize("draft_len", [1, 4])
@pytest.mark.parametrize("every", [1, 2, 3, 6, 40])
def test_waiting_never_costs_what_a_worker_without_a_drafter_has(every: int, draft_len: int) -> None:
    """Where one chain of so many comes in time, and others never."""
    office = Office()
    table = Table(office)
    table.admit("a")
    for number in range(600):
        office.delay_s = 0.3 * PASS_S if number % every == 0 else inf
        table.step(draft_len)
    assert len(table.texts["a"]) / office.time_s >= 0.97 / PASS_S


def test_nobody_waits_for_a_liar_and_little_of_it_is_verified() -> None:
    office = Office(delay_s=0.3 * PASS_S)
    table = Table(office, token=2)  # no guess is ever right
    table.admit("a")
    for _ in range(50):
        table.step()
    before = table.drafter.drafted
    table.waits_s.clear()
    for _ in range(10 * PROBE_ROUNDS):
        table.step()
    assert table.drafter.drafted - before <= 10
    assert sum(table.waits_s) == 0.0
    office.guesses = [2, 2, 2, 2]  # it has come to its senses
    for _ in range(10 * PROBE_ROUNDS):
        table.step()
    assert len(table.step()[0]) >= 2


def test_no_text_of_a_request_that_stays_here_is_sent() -> None:
    table = Table(Office(delay_s=0.0))
    table.admit("secret", [8, 9], local=True)
    text = [8, 9]
    assert table.drafter.propose([Ask("secret", text, 4, local=True)]) == [[]]
    text.append(1)
    table.drafter.verified([Verified("secret", text, HIDDEN)])
    assert table.office.sent == []


def test_a_text_that_must_stay_here_from_now_on_is_not_sent_any_further() -> None:
    table = Table(Office())
    table.admit("a")
    table.step()
    before = len(table.office.rows())
    table.texts["a"].append(7)
    table.drafter.verified([Verified("a", table.texts["a"], HIDDEN, local=True)])
    assert [(row.handle, row.tokens, row.forget) for row in table.office.rows()[before:]] == [(1, (), True)]


def test_guesses_at_the_outcome_are_asked_for_where_the_drafter_has_time_for_them() -> None:
    for welcome, requests, fan in (
        (USUAL._replace(widest_fan=4, step_s=0.001, chain_s=0.0), 1, 4),
        (USUAL._replace(widest_fan=2**32 - 1, step_s=0.001, chain_s=0.0), 1, 4),
        (USUAL._replace(widest_fan=3, step_s=0.001, chain_s=0.0), 1, 3),
        (USUAL._replace(widest_fan=4, step_s=0.001, chain_s=0.0001), 1, 2),
        (USUAL._replace(widest_fan=4, step_s=0.001, chain_s=0.0001), 20, 0),
        (USUAL._replace(widest_fan=4, step_s=0.001, chain_s=0.001), 1, 0),
        (USUAL._replace(widest_fan=1, step_s=0.001), 1, 0),
    ):
        table = Table(Office(), welcome)
        for number in range(requests):
            table.admit(str(number))
        table.step()
        last = table.office.rows()[-1]
        assert (last.fan, last.depth) == (fan, last.need + 1 if fan else 0)


@pytest.mark.parametrize(("delay", "guesses"), [(0.7, False), (1.8, True)])
def test_where_others_can_run_until_drafts_are_here_nothing_is_guessed_beyond_the_truth(
    delay: float, guesses: bool
) -> None:
    table = Table(Office(delay_s=delay * PASS_S), USUAL._replace(widest_fan=4, step_s=0.001))
    table.admit("a")
    for spare in [False] * 10 + [True, False]:
        if spare:
            table.drafter.late([Ask("a", table.texts["a"], 4)])
        table.step()
        last = table.office.rows()[-1]
        assert (last.ahead > last.need) == (last.fan > 1) == (guesses or not spare)


def test_a_guess_at_the_outcome_serves_where_the_main_chain_was_wrong() -> None:
    office = Office(delay_s=0.0, guesses=[1, 8, 8, 8])
    table = Table(office)
    table.admit("a")
    table.step()
    office.delay_s = inf
    text = [*table.texts["a"], 1]  # the first guess is right, the second is not
    office.coming.append((0.0, Drafts(0.0, [(1, Chain(len(text), extended(EMPTY, text), [1, 1, 1]))])))
    assert table.step() == [[1, 8, 8, 8]]
    assert table.drafter.propose([Ask("a", table.texts["a"], 4)]) == [[1, 1]]  # what follows the second 1


def test_a_drafter_that_comes_anew_is_told_everything() -> None:
    table = Table(Office())
    table.admit("a")
    table.step()
    sent = len(table.office.sent)
    table.office.coming = [(0.0, Gone())]
    table.step()
    assert len(table.office.sent) == sent  # nobody is there
    table.office.coming = [(0.0, Welcome(64, 16, 10_000, 100))]
    table.step()
    assert [(row.handle, row.start, row.tokens) for row in table.office.sent[sent]] == [(1, 0, [5, 6, 1, 1, 1])]


def test_of_a_long_text_no_more_than_two_guesses_at_a_position_are_asked_for() -> None:
    for length, fan in ((WIDE_TOKENS - 2, 4), (WIDE_TOKENS, 2)):
        table = Table(Office(), USUAL._replace(widest_fan=4, step_s=0.001))
        table.admit("a", [5] * length)
        table.step()
        assert table.office.rows()[-1].fan == fan


def test_what_found_no_room_is_told_later() -> None:
    table = Table(Office(full=True))
    table.admit("a")
    table.step()
    table.office.full = False
    table.step()
    assert table.office.texts == {1: table.texts["a"]}


def test_a_long_text_goes_in_pieces_of_which_the_last_asks_for_guesses() -> None:
    table, text = Table(Office(), Welcome(64, 16, 10**6, 100)), [3] * (2 * MESSAGE_TOKENS + 5)
    table.admit("a", text)
    rows = table.office.rows()
    assert [len(row.tokens) for row in rows] == [MESSAGE_TOKENS, MESSAGE_TOKENS, 5]
    assert [bool(row.ahead) for row in rows] == [False, False, True]
    assert [bool(row.salt) for row in rows] == [True, False, False]
    assert table.office.texts[1] == text


def test_no_more_requests_than_the_drafter_takes_and_no_longer_texts() -> None:
    table = Table(Office(), Welcome(2, 16, 10, 100))
    for name in "abc":
        table.admit(name)
    table.admit("long", [4] * 11)
    for _ in range(4):
        table.step()
    assert {row.handle for row in table.office.rows()} == {1, 2}
    table.drafter.forget("a")
    del table.texts["a"]
    before = len(table.office.sent)
    table.step()
    assert [row.forget for rows in table.office.sent[before:] for row in rows if row.handle == 1] == [True]
    assert {row.handle for rows in table.office.sent[before:] for row in rows} == {1, 2, 3}  # c has its place
    assert all(len(rows) <= 2 for rows in table.office.sent)
    for _ in range(6):
        table.step()
    assert max(row.start + len(row.tokens) for row in table.office.rows()) == 10
    assert not table.drafter._handles  # they have outgrown it, and their places are free


def test_a_text_with_tokens_that_the_drafter_has_not_is_not_sent() -> None:
    table = Table(Office())
    table.admit("a", [5, 100])
    table.step()
    assert table.office.sent == []


@pytest.mark.parametrize(
    ("refused", "told"),
    [
        (Refused(1, send_from=1), [6, 1, 1]),
        (Refused(1), []),
        (Refused(99, send_from=0), [1]),
    ],
)
def test_what_a_drafter_lacks_is_sent_again_and_what_it_does_not_want_is_not(refused: Refused, told: list[int]) -> None:
    table = Table(Office())
    table.admit("a")
    table.step()
    sent = len(table.office.rows())
    table.office.coming = [(0.0, Drafts(0.0, [], [refused]))]
    table.step()
    rows = table.office.rows()[sent:]
    assert [token for row in rows for token in row.tokens] == told


def test_one_that_loses_a_text_again_and_again_is_not_told_it_for_ever() -> None:
    table = Table(Office())
    table.admit("a", [5] * 1000)
    for _ in range(30):
        handle = table.drafter._last_handle
        table.office.coming = [(0.0, Drafts(0.0, [], [Refused(handle, send_from=0)]))]
        table.step()
    assert sum(len(row.tokens) for row in table.office.rows()) < 6 * 1000


def test_salts_are_told_by_a_keyed_digest_alone() -> None:
    table = Table(Office())
    for name, salt in (("a", "acme"), ("b", "acme"), ("c", "other"), ("d", "")):
        table.admit(name, salt=salt)
    a, b, c, d = (row.salt for row in table.office.rows())
    assert a == b != c != d
    assert len({len(salt) for salt in (a, c, d)}) == 1
    assert a not in {row.salt for row in another_key().office.rows()}


def another_key() -> Table:
    table = Table(Office())
    table.drafter._key = b"another"
    table.admit("a", salt="acme")
    return table


def test_a_chain_is_as_long_as_its_chance_allows() -> None:
    worth = Worth()
    for right, most in ((0.9, 16), (0.5, 2), (LEAST_CHANCE / 2, 0)):
        worth.right = right
        assert worth.length(16) == most
    assert worth.gain(3) == pytest.approx(sum((LEAST_CHANCE / 2) ** n for n in (1, 2, 3)))


def test_one_that_is_not_to_have_a_place_leaves_it_to_another() -> None:
    table = Table(Office(), Welcome(1, 16, 100, 100))
    table.admit("a")
    table.admit("b")
    table.step()
    assert set(table.office.texts) == {1}
    text = table.texts.pop("a")
    table.drafter.propose([Ask("a", text, 4, local=True)])
    before = len(table.office.rows())
    table.step()
    assert [(row.handle, row.forget) for row in table.office.rows()[before:]] == [(1, True), (2, False)]


def test_a_text_that_outgrows_the_drafter_frees_its_place_only_once_it_is_told_so() -> None:
    table = Table(Office(), Welcome(1, 16, 3, 100))
    table.admit("a", [5, 6, 7])
    table.admit("b", [8])
    for _ in range(3):
        table.step()
    told = [(row.handle, row.forget) for row in table.office.rows()]
    assert told.index((1, True)) < told.index((2, False))
