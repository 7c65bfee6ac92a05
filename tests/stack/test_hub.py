"""Models of the hub, from a fake one on loopback: what is fetched, what a cache is worth without the hub, and what each
refusal says."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

import tests.stack.fake_hub as fake_hub_module
from tests.stack.fake_hub import COMMIT, FakeHub, fake_hub
from tests.tiny_model import make_tiny_model
from tests.waiting import WAIT_S
from worker_service import pull as pulling
from worker_service.hub import SPARE_BYTES
from worker_service.model_files import ModelError, locked
from worker_service.models import load
from worker_service.pull import resolve

TINY = "owner/tiny"
NOBODY = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = make_tiny_model(tmp_path_factory.mktemp("hub") / "tiny")
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def hub(tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as hub:
        hub.repositories[TINY] = {**tiny, "pytorch_model.bin": b"x" * 1000, "onnx/model.safetensors": b"x" * 1000}
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        files = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)  # of a broken download whole chunks are kept
        monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between attempts of huggingface_hub
        yield hub


def test_only_what_serving_needs_is_fetched(hub: FakeHub, tmp_path: Path) -> None:
    folder = resolve(TINY, tmp_path)
    assert (folder / "model.safetensors").is_file()
    assert not (folder / "pytorch_model.bin").exists()
    assert not (folder / "onnx").exists()


def test_a_model_of_the_hub_is_served_under_its_name_there(hub: FakeHub, tmp_path: Path) -> None:
    assert load(str(resolve(TINY, tmp_path)), "cpu", "float32").name == TINY


def test_a_fetched_model_needs_no_hub(hub: FakeHub, tmp_path: Path) -> None:
    folder = resolve(TINY, tmp_path)
    hub.asked.clear()
    assert resolve(TINY, tmp_path) == folder
    assert hub.asked == []


def test_a_revision_is_a_model_of_its_own(hub: FakeHub, tmp_path: Path) -> None:
    assert resolve(f"{TINY}@v1", tmp_path) == resolve(f"{TINY}@{COMMIT}", tmp_path)
    with pytest.raises(ModelError, match="has no revision 'v2'"):
        resolve(f"{TINY}@v2", tmp_path)


def test_weights_in_several_files_are_all_fetched(hub: FakeHub, tmp_path: Path, tiny: dict[str, bytes]) -> None:
    parts = {f"model-0000{i}-of-00002.safetensors": tiny["model.safetensors"] for i in (1, 2)}
    index = {"weight_map": dict(zip("ab", parts, strict=True))}
    rest = {name: data for name, data in tiny.items() if name != "model.safetensors"}
    hub.repositories[TINY] = {**rest, **parts, "model.safetensors.index.json": json.dumps(index).encode()}
    folder = resolve(TINY, tmp_path)
    assert sorted(file.name for file in folder.glob("*.safetensors")) == sorted(parts)


def test_a_broken_download_goes_on_where_it_was(hub: FakeHub, tmp_path: Path, tiny: dict[str, bytes]) -> None:
    hub.breaks_at["model.safetensors"] = 1000
    with pytest.raises(ModelError, match="answered 503"):
        resolve(TINY, tmp_path)
    hub.gone.clear()
    folder = resolve(TINY, tmp_path)
    assert hub.ranges["model.safetensors"] == ["", "bytes=1000-"]
    assert (folder / "model.safetensors").read_bytes() == tiny["model.safetensors"]


def test_a_broken_download_needs_room_for_the_rest_alone(
    hub: FakeHub, tmp_path: Path, tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.breaks_at["model.safetensors"] = 1000
    with pytest.raises(ModelError, match="answered 503"):
        resolve(TINY, tmp_path)
    hub.gone.clear()
    real, rest = shutil.disk_usage(tmp_path), len(tiny["model.safetensors"]) - 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=rest + SPARE_BYTES - 1))
    with pytest.raises(ModelError, match="no room on the disk"):
        resolve(TINY, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=rest + SPARE_BYTES))
    resolve(TINY, tmp_path)
    assert hub.ranges["model.safetensors"] == ["", "bytes=1000-"]


def test_what_is_fetched_but_not_yet_in_the_model_needs_no_room(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (resolve(TINY, tmp_path) / "model.safetensors").unlink()  # a link to what was fetched
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=SPARE_BYTES))
    resolve(TINY, tmp_path)
    assert hub.ranges["model.safetensors"] == [""]


def test_who_waits_for_a_download_appends_nothing_to_what_is_finished(tmp_path: Path) -> None:
    part, blob = tmp_path / "blob.part", tmp_path / "blob"

    def append() -> None:
        with locked(part) as file:
            file.write(b"second")

    waiting = Thread(target=append)
    with locked(part) as file:
        waiting.start()
        file.write(b"first")
        part.rename(blob)
    waiting.join(WAIT_S)
    assert (blob.read_bytes(), part.read_bytes()) == (b"first", b"second")


def test_an_error_during_a_download_is_told_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), locked(tmp_path / "blob.part"):
        (tmp_path / "nowhere").unlink()


def test_what_arrives_damaged_is_not_used(
    hub: FakeHub, tmp_path: Path, tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    etag = fake_hub_module.etag
    monkeypatch.setattr(
        fake_hub_module, "etag", lambda data: "0" * 64 if data == tiny["model.safetensors"] else etag(data)
    )
    with pytest.raises(ModelError, match=r"wrong checksum: model.safetensors of owner/tiny"):
        resolve(TINY, tmp_path)
    assert not list(tmp_path.rglob("*.part"))


def test_a_model_that_cannot_be_served_is_refused_before_its_weights_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories[TINY]["config.json"] = b'{"model_type": "vit"}'
    with pytest.raises(ModelError, match="owner/tiny: architecture 'vit'"):
        resolve(TINY, tmp_path)
    assert "model.safetensors" not in hub.ranges


@pytest.mark.parametrize(
    ("refusal", "sentence"),
    [
        ((401, "GatedRepo"), "owner/other is gated: accept its terms at http"),
        ((403, "GatedRepo"), "owner/other is gated"),
        ((403, ""), "it answered 403; HF_TOKEN does not allow it"),
        ((404, "RepoNotFound"), "no folder owner/other here, and http://127.0.0.1:[0-9]+ has no such model"),
        ((401, ""), "it answered 401; is HF_TOKEN right?"),
        ((500, ""), "it answered 500"),
    ],
)
def test_each_refusal_is_a_sentence(refusal: tuple[int, str], sentence: str, hub: FakeHub, tmp_path: Path) -> None:
    hub.refusals["owner/other"] = refusal
    with pytest.raises(ModelError, match=sentence) as raised:
        resolve("owner/other", tmp_path)
    assert "\n" not in str(raised.value)


def test_without_hub_and_cache_the_error_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    with pytest.raises(ModelError, match=f"no folder {TINY} here, the cache .*{tmp_path}.* cannot be reached"):
        resolve(TINY, tmp_path)


def test_a_full_disk_is_noticed_before_the_download(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=1000))
    with pytest.raises(ModelError, match=r"no room on the disk of .*needs .* MB"):
        resolve(TINY, tmp_path)
    assert hub.ranges == {}


def test_a_disk_that_fills_up_meanwhile_is_a_sentence(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub.file_download, "http_get", full)
    with pytest.raises(ModelError, match="no room on the disk"):
        resolve(TINY, tmp_path)


def test_a_file_too_large_for_http_comes_from_xet_or_is_a_sentence(
    hub: FakeHub, tmp_path: Path, tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tiny["model.safetensors"]
    assert all(len(data) < len(weights) for data in tiny.values() if data is not weights)
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", len(weights) - 1)
    with pytest.raises(ModelError, match=f"owner/tiny cannot be fetched into {tmp_path}/hub: .*too large.*hf_xet"):
        resolve(TINY, tmp_path)
    hub.xet = {"model.safetensors"}

    def from_xet(*, incomplete_path: Path, **_: Any) -> None:
        incomplete_path.write_bytes(weights)

    monkeypatch.setattr(huggingface_hub.file_download, "xet_get", from_xet)
    assert (resolve(TINY, tmp_path) / "model.safetensors").read_bytes() == weights
    assert "model.safetensors" not in hub.ranges


def test_a_gguf_of_the_hub_is_converted_once(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        converted.append(gguf)
        (folder / "config.json").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(pulling, "convert", convert)
    hub.repositories["owner/gguf"] = {"small.Q4_1.gguf": b"GGUF", "big.gguf": b"GGUF" * 9}
    folder = resolve("owner/gguf:small.Q4_1.gguf", tmp_path)
    assert (folder / "config.json").read_bytes() == b"GGUF"
    assert resolve("owner/gguf:small.Q4_1.gguf", tmp_path) == folder
    assert len(converted) == 1
    assert "big.gguf" not in hub.ranges


def test_a_repository_of_ggufs_says_which_it_has(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories["owner/gguf"] = {"small.gguf": b"GGUF"}
    with pytest.raises(ModelError, match=r"its GGUF files: small.gguf; name one: owner/gguf:FILE"):
        resolve("owner/gguf", tmp_path)
    with pytest.raises(ModelError, match=r"has no file other.gguf"):
        resolve("owner/gguf:other.gguf", tmp_path)


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_tiny_model(tmp_path / TINY)
    assert resolve(TINY) == folder.resolve()


def laps_sd(*words: str, hub: str, home: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(home)}
    environment.pop("LAPS_SD_CACHE", None)
    command = [sys.executable, "-m", "laps_sd", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_person_pulls_from_a_hub_and_finds_it_again_without_one(hub: FakeHub, tmp_path: Path) -> None:
    first = laps_sd("pull", TINY, hub=hub.url, home=tmp_path)
    assert Path(first.stdout.strip(), "model.safetensors").is_file(), first.stderr
    assert laps_sd("pull", TINY, hub=NOBODY, home=tmp_path).stdout == first.stdout
    missing = laps_sd("pull", "owner/nothing", hub=hub.url, home=tmp_path)
    assert (missing.returncode, missing.stdout, missing.stderr.count("\n")) == (2, "", 1)
    assert missing.stderr.startswith("laps-sd: ")


def test_a_service_that_cannot_fetch_its_model_says_so_and_may_be_started_again(tmp_path: Path) -> None:
    """Exit code 2 would tell systemd that it never can."""
    ended = laps_sd("up", "--model", TINY, "--grpc-port", "0", "--http-port", "0", hub=NOBODY, home=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1), ended.stderr
    assert ended.stderr.startswith(f"laps-sd: there is no folder {TINY} here")


def test_the_list_names_size_licence_and_what_is_cached(tmp_path: Path) -> None:
    rows = laps_sd("pull", "--list", hub=NOBODY, home=tmp_path).stdout.splitlines()
    assert any(row.split()[0] == "Qwen/Qwen3-0.6B" and "Apache-2.0" in row and row.split()[-1] == "no" for row in rows)
