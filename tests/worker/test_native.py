"""What a worker says of native kernels that it cannot have."""

import logging
from pathlib import Path

import pytest

from worker_service.engine import native


def test_a_compiler_that_fails_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo mine && exit\necho "unknown flag" >&2\nexit 4\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert native.kernels.__wrapped__() is None
    assert "exit status 4" in caplog.text
    assert "unknown flag" in caplog.text
