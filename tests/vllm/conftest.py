"""Counts what the tests of this folder did to a scheduler, so that a run that did nothing cannot pass."""

import os
from collections import Counter
from typing import Any

import pytest

DID: Counter[str] = Counter()  # steps, pauses, drops and so on, of all tests
WANTED = ("steps", "pauses", "drops")


@pytest.fixture
def did() -> Counter[str]:
    return DID


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if DID:
        counted = ", ".join(f"{count:,} {what}" for what, count in sorted(DID.items()))
        terminalreporter.write_line(f"what was done to schedulers: {counted}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """`make test-vllm` sets LAPS_SD_VLLM_WHOLE: then there must have been steps, pauses and drops."""
    if os.environ.get("LAPS_SD_VLLM_WHOLE") and not exitstatus and not all(DID[what] for what in WANTED):
        session.config.get_terminal_writer().line(f"nothing was tested: {dict(DID)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
