"""A folder of a process's own goes with it; if the process was killed, when the next one begins."""

import errno
import fcntl
import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from laps_sd.scratch import LOCK, PREFIX, scratch

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere services may outlive a killed process")
KEEPS_ONE = """
from laps_sd.scratch import scratch

with scratch() as folder:
    (folder / "request").write_text("a secret")
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_folder_lasts_as_long_as_its_block(tmp_path: Path) -> None:
    with scratch() as folder:
        (folder / "redis").mkdir()
        assert folder.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


@LINUX
def test_what_a_killed_process_left_goes_and_what_a_live_one_has_stays() -> None:
    command = [sys.executable, "-c", KEEPS_ONE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        kept = Path(process.stdout.readline().strip())
        try:
            with scratch():
                assert (kept / "request").read_text() == "a secret"
        finally:
            process.send_signal(signal.SIGKILL)
        process.wait()
        assert kept.exists()
        with scratch():
            assert not kept.exists()


def test_folders_of_another_kind_stay(tmp_path: Path) -> None:
    other, file = tmp_path / f"{PREFIX}kernels-1", tmp_path / f"{PREFIX}demo.log"
    other.mkdir()
    file.touch()
    with scratch():
        assert other.exists()
        assert file.exists()


@LINUX
def test_a_folder_that_another_host_may_use_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / f"{PREFIX}other"
    other.mkdir()
    (other / LOCK).write_text("another host")
    with scratch():
        assert other.exists()
    monkeypatch.setattr(platform, "node", lambda: "another host")
    with scratch():
        assert not other.exists()


def test_a_pipe_or_a_link_in_place_of_the_lock_holds_nobody_up(tmp_path: Path) -> None:
    pipe, link = tmp_path / f"{PREFIX}pipe", tmp_path / f"{PREFIX}link"
    for folder in (pipe, link):
        folder.mkdir()
    os.mkfifo(pipe / LOCK)
    (tmp_path / "mine").write_text(platform.node())
    (link / LOCK).symlink_to(tmp_path / "mine")
    with scratch():
        assert link.exists()
    assert (tmp_path / "mine").exists()


def test_where_files_cannot_be_locked_a_folder_is_still_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refused)
    with scratch() as folder:
        assert folder.is_dir()
