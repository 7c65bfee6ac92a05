"""The link to a drafter elsewhere tells whose guesses are late, how often they were there, and what a token takes."""

import pytest

from tests.worker.office import HIDDEN, PASS_S, USUAL, Office, Table
from worker_service.engine.drafting.drafter import Ask, Verified
from worker_service.engine.drafting.prefix import EMPTY, extended
from worker_service.engine.drafting.remote import Chain
from worker_service.engine.drafting.remote_drafter import Drafts, Gone


def test_it_tells_whose_guesses_are_late_and_whether_they_come_within_a_pass() -> None:
    for delay, soon in ((0.7, True), (1.8, False)):
        table = Table(Office(delay_s=delay * PASS_S))
        table.admit("a")
        for _ in range(12):
            table.step()
        asks = [Ask(name, text, 4) for name, text in table.texts.items()]
        table.office.coming.clear()
        table.drafter.verified([Verified("a", table.texts["a"] + [9], HIDDEN)])
        asks = [Ask("a", [*table.texts["a"], 9], 4)]
        assert table.drafter.late(asks) == {"a": soon}
        assert table.drafter.late([asks[0]._replace(local=True)]) == {}


def test_a_wrong_guess_at_the_outcome_answers_no_text() -> None:
    """It begins where the text ends, but behind other tokens. What follows the text is still to come, and as late."""
    office = Office(delay_s=0.7 * PASS_S)
    table = Table(office)
    table.admit("a")
    for _ in range(12):
        table.step()
    office.coming.clear()
    text = [*table.texts["a"], 9]
    table.drafter.verified([Verified("a", text, HIDDEN)])
    wrong = Chain(len(text), extended(EMPTY, [*text[:-1], 8]), [1, 1])
    office.coming = [(office.time_s, Drafts(office.time_s, [(1, wrong)]))]
    assert table.drafter.late([Ask("a", text, 4)]) == {"a": True}
    assert table.drafter.elsewhere.delay_s == pytest.approx(0.7 * PASS_S)


def test_what_is_here_is_not_late() -> None:
    table = Table(Office(delay_s=PASS_S / 2))
    table.admit("a")
    table.office.time_s += PASS_S
    assert table.drafter.late([Ask("a", table.texts["a"], 4)]) == {}


def test_it_tells_how_often_guesses_were_there_and_that_a_drafter_has_gone() -> None:
    shares = []
    for delay in (0.1, 30):
        table = Table(Office(delay_s=delay * PASS_S))
        table.admit("a")
        for _ in range(60):
            table.step()
        found = table.drafter.elsewhere
        assert found.chains == USUAL.handles
        shares.append(found.hit)
    assert shares[0] > 0.9 > 0.5 > shares[1]
    table.office.coming.append((0.0, Gone()))
    table.step()
    assert table.drafter.elsewhere.chains == 0


def test_it_tells_what_a_token_takes_the_drafter_for_those_that_want_some_at_once() -> None:
    table = Table(Office(), USUAL._replace(step_s=0.004, chain_s=0.001))
    assert table.drafter.elsewhere.supply_s == 0.0  # nobody is there yet
    for name in "abc":
        table.admit(name)
    table.step()
    assert table.drafter.elsewhere.supply_s == pytest.approx(0.006)
