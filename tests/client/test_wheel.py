"""What the client's wheel is made of (deploy/client), without building it: `make test-doors` builds and installs it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PARTS = ("laps_sd", "protos", "LICENSE", "pyproject.toml")


@pytest.fixture
def gathered(tmp_path: Path) -> Path:
    """The sources of the wheel, gathered from this checkout in a folder of their own."""
    for part in PARTS:
        (tmp_path / part).symlink_to(REPOSITORY / part)
    project = tmp_path / "deploy" / "client"
    shutil.copytree(REPOSITORY / "deploy" / "client", project, ignore=shutil.ignore_patterns("gathered", "build"))
    subprocess.run([sys.executable, "-c", "import backend"], cwd=project, check=True)
    return project / "gathered"


def ask(program: str, *folders: Path) -> None:
    code = f"import sys; sys.path[:0] = {[str(folder) for folder in folders]!r}; {program}"
    asked = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=100)
    assert asked.returncode == 0, asked.stderr


def test_it_holds_one_package_and_imports_nothing_else_of_ours(gathered: Path) -> None:
    assert {each.name for each in gathered.iterdir() if each.is_dir()} == {"laps_sd"}
    assert {each.name for each in (gathered / "laps_sd").iterdir() if each.is_dir()} == {"client", "_protos"}
    ask("from laps_sd import Client; assert 'protos' not in sys.modules; Client('127.0.0.1:1')", gathered)


def test_its_messages_and_the_services_are_the_same_in_one_process(gathered: Path) -> None:
    program = (
        "import laps_sd._protos.v1.inference_pb2 as ours, protos.v1.inference_pb2 as theirs, "
        "protos.link.v1.gateway_link_pb2; assert ours.GenerateRequest is theirs.GenerateRequest"
    )
    ask(program, gathered, REPOSITORY)
