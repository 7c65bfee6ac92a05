"""The processes that serve HTTP find what the engines' processes write, whoever started whom. vLLM is not needed for
that."""

import multiprocessing
import os
import socket
from pathlib import Path

import pytest

from laps_sd_vllm import status
from laps_sd_vllm.background import write_whole
from laps_sd_vllm.status import Status

OLD = 1_000_000_000.0  # of 2001

SPAWN = multiprocessing.get_context("spawn")


def an_engine(folder: Path) -> None:
    Status("order", "gittins", plans=7).write(status.written(folder, 3))


def serves_http(folder: Path) -> None:
    told = status.read(status.find(folder, 3))
    assert told is not None
    assert told["plans"] == 7


def started(work: object, folder: Path) -> int | None:
    process = SPAWN.Process(target=work, args=(folder,))
    process.start()
    process.join()
    return process.exitcode


def test_an_engine_is_found_by_the_process_that_started_it(tmp_path: Path) -> None:
    assert started(an_engine, tmp_path) == 0
    serves_http(tmp_path)


def test_an_engine_is_found_by_another_child_of_the_process_that_started_it(tmp_path: Path) -> None:
    """--api-server-count 2"""
    assert started(an_engine, tmp_path) == 0
    assert started(serves_http, tmp_path) == 0


def test_an_engine_in_the_same_process_is_found(tmp_path: Path) -> None:
    an_engine(tmp_path)
    serves_http(tmp_path)


def test_containers_that_share_a_folder_write_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the first process of each is number 1."""
    files = set()
    for host in ("one", "two"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        files.add(status.written(tmp_path, 0))
        assert status.find(tmp_path, 0) in files
    assert len(files) == 2


def test_what_killed_servers_left_is_forgotten_half_written_files_too(tmp_path: Path) -> None:
    for name in ("old.json", "old.json.1-2.new", "fresh.json"):
        (tmp_path / name).touch()
    for file in tmp_path.glob("old*"):
        os.utime(file, (OLD, OLD))
    status.clean(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["fresh.json"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_whole(tmp_path / "taken", b"something")
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]
