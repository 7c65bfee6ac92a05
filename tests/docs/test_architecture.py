"""The documentation tells the truth where a test can check it, and the code keeps rules that no linter checks."""

import re
from pathlib import Path

import grimp

from scheduler_service.core.lifecycle import TRANSITIONS

ROOT = Path(__file__).parents[2]
PACKAGES = ("protos", "gateway", "scheduler_service", "worker_service", "laps_sd")


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


def test_no_module_imports_a_package_that_imports_it() -> None:
    """The circle that import-linter does not see: it compares the modules of a package with each other alone."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    upwards = [
        (module, above)
        for module in graph.modules
        for above in graph.find_modules_directly_imported_by(module)
        if module.startswith(f"{above}.")
    ]
    assert [each for each in upwards if graph.chain_exists(importer=each[1], imported=each[0])] == []
