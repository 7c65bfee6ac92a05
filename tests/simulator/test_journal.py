"""The journal of a long bench: what survives a stop, and what does not."""

from contextlib import suppress
from pathlib import Path

import pytest

from scheduler_service.sim.journal import Journal, code_digest

RUN = {"seeds": (1, 2)}
FIGURES = {"fcfs": {"mean_s": 0.1}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a run that was stopped after two units."""
    path = tmp_path / "unfinished.jsonl"
    with suppress(KeyboardInterrupt), Journal(path, RUN) as journal:
        journal.add("a", FIGURES)
        journal.add("b", FIGURES)
        raise KeyboardInterrupt
    return path


def test_what_a_stopped_run_measured_is_there(path: Path) -> None:
    with Journal(path, RUN) as journal:
        assert journal["a"] == FIGURES
        assert "c" not in journal


def test_it_may_be_stopped_again(path: Path) -> None:
    with suppress(KeyboardInterrupt), Journal(path, RUN):
        raise KeyboardInterrupt
    with Journal(path, RUN) as journal:
        assert "b" in journal


def test_a_finished_run_leaves_no_file(path: Path) -> None:
    with Journal(path, RUN):
        pass
    assert not path.exists()


def test_a_journal_of_another_run_begins_anew(path: Path) -> None:
    with Journal(path, {"seeds": (1, 2, 3)}) as journal:
        assert "a" not in journal


def test_a_line_cut_short_is_measured_again(path: Path) -> None:
    path.write_text(path.read_text()[:-5])
    with Journal(path, RUN) as journal:
        assert "a" in journal
        assert "b" not in journal


def test_a_file_that_is_no_journal_begins_anew(path: Path) -> None:
    path.write_bytes(b"")
    with Journal(path, RUN) as journal:
        assert "a" not in journal


def test_changed_code_changes_the_digest(tmp_path: Path) -> None:
    file = tmp_path / "policy.py"
    file.write_text("a")
    before = code_digest([file])
    file.write_text("b")
    assert code_digest([file]) != before
