"""How wide the tables of commands are."""

import pytest

from laps_sd import terminal


def test_a_pipe_gets_whole_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert terminal.console().width == terminal.PIPE_WIDTH


def test_a_width_that_is_asked_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    assert terminal.console().width == 90
