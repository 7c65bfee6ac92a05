"""The sources of native kernels, the words of a worker that can have none, and the memory that kernels read."""

import ctypes
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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


@pytest.mark.parametrize("kind", HERE, ids=lambda kind: kind.name)
def test_a_compiler_that_knows_a_kind_of_processor_takes_the_sources(kind: kernel_files.Kind, tmp_path: Path) -> None:
    (empty := tmp_path / "empty.cpp").write_text("")

    def check(source: Path) -> int:
        return subprocess.run(["c++", "-fsyntax-only", "-fopenmp", "-std=c++17", *kind.flags, source]).returncode

    if shutil.which("c++") is None or check(empty):
        pytest.skip("there is no compiler for this kind")
    assert check(kernel_files._SOURCES / "kernels.cpp") == 0


def test_a_processor_whose_tiles_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_files, "processor", lambda: "flags : amx_bf16")
    for allowed in (True, False):
        monkeypatch.setattr(kernel_files, "library", lambda: "kernels.so")
        monkeypatch.setattr(ctypes, "CDLL", lambda _, allowed=allowed: SimpleNamespace(tiles=lambda: allowed))
        native.kernels.__wrapped__()
        assert ("amx_bf16" in caplog.text) is not allowed


@pytest.mark.skipif("amx_bf16" not in kernel_files.processor().split(), reason="the processor has no tiles")
def test_tiles_are_used_where_system_and_compiler_let() -> None:
    request_permission, arch_prctl, tile_data = 0x1023, 158, 18  # on x86-64
    allowed = ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0
    if (kernels := native.kernels()) is None or kernel_files.carried():
        pytest.skip("no kernels were compiled here")
    macros = [kernel_files._compiler(), "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    known = subprocess.run(macros, capture_output=True, text=True)
    assert kernels.tiles() == (allowed and bool(re.search("__AMX_?BF16__", known.stdout)))


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
    monkeypatch.delenv(CARRIED_VARIABLE, raising=False)
    with caplog.at_level(logging.WARNING):
        assert native.kernels.__wrapped__() is None
    assert "exit status 4" in caplog.text
    assert "unknown flag" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells how memory is mapped")
def test_weights_and_kv_lie_in_private_memory() -> None:
    """Linux gives no large pages to memory that processes share."""
    memory, found = native.empty((4 << 20,), torch.uint8), []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, *_ = line.split()
        begin, end = (int(address, 16) for address in span.split("-"))
        if begin <= memory.data_ptr() < end:
            found.append(access)
    assert found == ["rw-p"]
