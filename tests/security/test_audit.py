"""The audit of dependencies: findings fail it, silence is loud and fails it only where that is asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AUDIT = Path(__file__).parents[2] / "deploy" / "audit.py"
CLEAN = {"name": "jinja2", "version": "3.1.6", "vulns": []}
BAD = {"name": "old", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1"]}]}
OWN = {"name": "laps-sd", "skip_reason": "distribution marked as editable"}
SKIPPED = {"name": "torch", "skip_reason": "Dependency not found on PyPI"}


def audit(folder: Path, program: str, *flags: str) -> tuple[int, str]:
    """The script, with `program` in pip-audit's place."""
    (folder / "pip_audit").mkdir()
    (folder / "pip_audit" / "__init__.py").touch()
    (folder / "pip_audit" / "__main__.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    ended = subprocess.run([sys.executable, AUDIT, *flags], env=environment, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stdout


def answering(*packages: dict[str, Any]) -> str:
    return f"print({json.dumps(json.dumps({'dependencies': packages, 'fixes': []}))})"


def test_a_clean_environment_passes(tmp_path: Path) -> None:
    assert audit(tmp_path, answering(CLEAN, OWN), "--strict") == (0, "audit: no known vulnerabilities in 1 packages\n")


def test_a_finding_fails_and_says_what_mends_it(tmp_path: Path) -> None:
    code, output = audit(tmp_path, answering(CLEAN, BAD, SKIPPED) + "\nraise SystemExit(1)")
    assert code == 1
    assert "old 1.0: PYSEC-1, mended in 1.1" in output


@pytest.mark.parametrize(("flags", "code"), [([], 0), (["--strict"], 1)])
@pytest.mark.parametrize("program", ["raise OSError('unreachable')", answering(CLEAN, SKIPPED), answering()])
def test_what_is_not_known_is_said_loudly(tmp_path: Path, program: str, flags: list[str], code: int) -> None:
    ended, output = audit(tmp_path, program, *flags)
    assert ended == code
    assert "NOT audited" in output
    assert "!!!!" in output
