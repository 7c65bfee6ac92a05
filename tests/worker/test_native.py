"""The sources of native kernels, and the words of a worker that can have none."""

import ctypes
import logging
import platform
import shutil
import tempfile
from pathlib import Path

import pytest

from worker_service.engine import kernel_files, native
from worker_service.engine.kernel_files import CACHE_VARIABLE, CARRIED_VARIABLE, KINDS

HERE = KINDS.get(platform.machine(), ())


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an image that carries a file for every kind of processor."""
    monkeypatch.setenv(CARRIED_VARIABLE, str(tmp_path))
    monkeypatch.setattr(kernel_files, "_compiler", lambda: "c++")
    monkeypatch.setattr(kernel_files, "_compile", lambda cxx, flags, file, timeout_s: file.write_text(" ".join(flags)))
    kernel_files.compile_all(tmp_path)
    return tmp_path


@pytest.mark.skipif(not HERE, reason="images are built for other architectures")
@pytest.mark.parametrize("kind", HERE, ids=lambda kind: kind.name)
def test_of_what_an_image_carries_the_best_that_the_processor_runs_is_taken(
    image: Path, kind: kernel_files.Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_files, "processor", lambda: f"flags : {' '.join(kind.needs)}")
    assert kernel_files.library().read_text() == " ".join(kind.flags)


def test_an_older_processor_gets_none_of_them(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_files, "processor", lambda: "flags : sse2")
    assert kernel_files.carried() is None


def test_files_of_other_sources_are_not_taken(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_files, "_FLAGS", ("-O1",))
    assert kernel_files.carried() is None


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_a_cache_that_is_read_only_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels.cpp").write_text('extern "C" int seven() { return 7; }')
    monkeypatch.setattr(kernel_files, "_SOURCES", tmp_path)
    monkeypatch.setenv(CACHE_VARIABLE, "/proc/read-only")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert ctypes.CDLL(str(kernel_files.library())).seven() == 7


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
