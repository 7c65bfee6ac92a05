"""The documentation tells the truth where a test can check it, and the code keeps rules that no linter checks."""

import re
from pathlib import Path

import grimp

from scheduler_service.core.lifecycle import TRANSITIONS

ROOT = Path(__file__).parents[2]
GENERATED = ("_pb2", "_pb2_grpc")
PACKAGES = ("protos", "gateway", "scheduler_service", "worker_service", "laps_sd", "laps_sd_vllm")


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


def test_no_file_is_long() -> None:
    """One that grows beyond this has more than one idea. Generated code may be as long as it is."""
    most = {"scheduler_service/leader.py": 249, "scheduler_service/core/core.py": 249}
    files = [file.relative_to(ROOT) for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    lines = {
        str(file): len((ROOT / file).read_text().splitlines()) for file in files if not file.stem.endswith(GENERATED)
    }
    assert most.keys() <= lines.keys()
    assert {name: count for name, count in lines.items() if count > most.get(name, 300)} == {}
