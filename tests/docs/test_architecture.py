"""The documentation tells the truth where a test can check it."""

import re
from pathlib import Path

from scheduler_service.core.lifecycle import TRANSITIONS

ROOT = Path(__file__).parents[2]


def test_the_drawn_life_cycle_is_the_table() -> None:
    drawn = set(re.findall(r"^    (\w+) --> (\w+) : (\w+)$", (ROOT / "ARCHITECTURE.md").read_text(), re.M))
    table = {(s.value, then.value, move.value) for s, moves in TRANSITIONS.items() for move, then in moves.items()}
    assert drawn == table


def test_tests_that_hold_the_claims_on_security_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / "SECURITY.md").read_text()))
    assert len(named) > 10
    homes = (ROOT, ROOT / "tests" / "security")
    assert [path for path in sorted(named) if not any((home / path).exists() for home in homes)] == []


def test_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = re.findall(r"`((?:protos|gateway|scheduler_service|worker_service|laps_sd)/[\w/]+\.\w+)`", text)
    assert len(named) > 8
    assert [path for path in named if not (ROOT / path).exists()] == []
