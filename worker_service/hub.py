"""Models of the Hugging Face hub: how they are named, fetched, and found again without the hub. No model is read here.

`huggingface_hub` does the work. Only a worker's environment has it, so it is imported where it is used. It reads
HF_ENDPOINT (another hub), HF_TOKEN (for models that are not open to everybody), HF_HUB_OFFLINE and HF_HOME.
"""

import errno
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from worker_service.model_files import (
    CACHE_VARIABLE,
    CONFIG,
    SHARDS_INDEX,
    TOKENIZER,
    WEIGHTS,
    ModelError,
    OutOfReachError,
    check_config,
    is_complete,
    locked,
    shards,
)

MAIN = "main"
_PASSING = (429, 500, 502, 503, 504)  # answers of a hub that another time may be others
ASK_S = 10.0  # for an answer of the hub that is no file
SPARE_BYTES = 64 << 20  # that stay free on the disk
# Beside the weights. A model may lack all but the first two.
_SMALL = (
    CONFIG,
    TOKENIZER,
    SHARDS_INDEX,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_WORD = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(
    rf"(?P<repository>{_WORD}/{_WORD})(?:@(?P<revision>[\w.][\w./-]*))?(?::(?P<file>[\w. /-]+\.gguf))?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class HubName:
    """What somebody asked for: OWNER/NAME, with @REVISION (a branch, a tag or a commit), and :FILE.gguf."""

    repository: str
    revision: str = MAIN
    file: str = ""

    def __str__(self) -> str:
        at = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{self.repository}{at}{':' * bool(self.file)}{self.file}"


def parse_name(text: str) -> HubName | None:
    """None if the text has not the form of a hub's model."""
    found = _NAME.fullmatch(text)
    return HubName(found["repository"], found["revision"] or MAIN, found["file"] or "") if found else None


def hub_cache(cache: Path | None = None) -> Path:
    """Where the hub's models are kept: in our cache where one was named, else in the hub's own, so that a model which
    another program fetched is not fetched again."""
    from huggingface_hub.constants import HF_HUB_CACHE

    if cache is None and (named := os.environ.get(CACHE_VARIABLE)):
        cache = Path(named)
    return cache / "hub" if cache else Path(HF_HUB_CACHE)


def find(name: HubName, cache: Path | None = None) -> Path | None:
    """The model's directory, or its GGUF file, if it was fetched before and all of it is there. Asks nobody."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            name.repository,
            revision=name.revision,
            cache_dir=hub_cache(cache),
            local_files_only=True,
            allow_patterns=[name.file or CONFIG],
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    if name.file:
        file = Path(folder, name.file)
        return file if file.is_file() else None
    return Path(folder) if is_complete(Path(folder)) else None


def locate(name: HubName, cache: Path | None = None) -> Path:
    """As `find`, and what is not there is fetched from the hub. A download that broke off goes on where it was. On a
    terminal its progress is shown. Raises ModelError."""
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    with _in_words(name, hub_cache(cache)):
        return find(name, cache) or _fetch(name, hub_cache(cache))


def _fetch(name: HubName, folder: Path) -> Path:
    """Of a repository only what serving needs. Raises ModelError, and what the hub's library raises."""
    sizes = _sizes(name)
    if name.file:
        return _download(name, folder, {name.file: sizes[name.file]}, large=True) / name.file
    snapshot = _download(name, folder, {file: sizes[file] for file in _SMALL if file in sizes})
    check_config(snapshot, name.repository)  # before gigabytes of weights are fetched
    weights = [WEIGHTS] if WEIGHTS in sizes else shards(snapshot)
    _download(name, folder, {file: sizes.get(file, 0) for file in weights}, large=True)
    if not is_complete(snapshot):
        raise ModelError(f"{name}: the hub lacks files that {SHARDS_INDEX} names")
    return snapshot


def repository_of(folder: Path) -> str | None:
    """OWNER/NAME of a directory in the hub's cache (models--OWNER--NAME/snapshots/COMMIT); None of any other."""
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return None
    return repository.removeprefix("models--").replace("--", "/")


def _sizes(name: HubName) -> dict[str, int]:
    """The files of the repository, in bytes. Raises ModelError if what is needed is not among them."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(name.repository, revision=name.revision, files_metadata=True, timeout=ASK_S)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    ggufs = sorted(file for file in sizes if file.endswith(".gguf"))
    if name.file:
        if name.file not in sizes:
            raise ModelError(f"{name.repository} has no file {name.file}; {_named(ggufs)}")
        return sizes
    if not (WEIGHTS in sizes or SHARDS_INDEX in sizes):
        raise ModelError(f"{name.repository} has no {WEIGHTS}; {_named(ggufs, f'name one: {name.repository}:FILE')}")
    for needed in (CONFIG, TOKENIZER):
        if needed not in sizes:
            raise ModelError(f"{name.repository} has no {needed}, without which it cannot be served")
    return sizes


def _named(ggufs: list[str], advice: str = "") -> str:
    return f"its GGUF files: {', '.join(ggufs)}{'; ' * bool(advice)}{advice}" if ggufs else "it has no GGUF file either"


def _download(name: HubName, folder: Path, sizes: dict[str, int], *, large: bool = False) -> Path:
    """The snapshot with these files in it. `large`: a download that broke off goes on where it was. Raises ModelError,
    also if the disk has no room for them."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **{**given, "disable": True})

    folder.mkdir(parents=True, exist_ok=True)
    cached = {file: try_to_load_from_cache(name.repository, file, folder, name.revision) for file in sizes}
    missing = {file: size for file, size in sizes.items() if not isinstance(cached[file], str)}
    free, needed = shutil.disk_usage(folder).free, sum(missing.values())
    if large and free < needed + SPARE_BYTES:
        needed -= sum(_fetched(name, file, folder) for file in missing)
    if missing and free < needed + SPARE_BYTES:
        raise OutOfReachError(_no_room(name, folder, f"needs {_megabytes(needed)}, {_megabytes(free)} are free"))
    for file in missing if large else ():
        _download_blob(name, file, folder)
    patterns = [re.sub(r"([*?[])", r"[\1]", file) for file in sizes]  # the names and nothing else
    return Path(
        snapshot_download(
            name.repository,
            revision=name.revision,
            cache_dir=folder,
            allow_patterns=patterns,
            etag_timeout=ASK_S,
            tqdm_class=Silent,  # small files, and links to the large ones, which have a bar each
        )
    )


def _fetched(name: HubName, file: str, folder: Path) -> int:
    """Bytes of a file that an earlier download has left."""
    blob = _blob(name, file, folder)[2]
    there = [each for each in (blob, blob.with_suffix(".part")) if each.exists()] if blob else []
    return there[0].stat().st_size if there else 0


def _blob(name: HubName, file: str, folder: Path) -> tuple[str, Any, Path | None]:
    """A file's URL, what the hub says of it, and where the hub's library looks for its content before it downloads:
    blobs/ETAG. None: the ETag is no name for a file."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name

    url = hf_hub_url(name.repository, file, revision=name.revision)
    about = get_hf_file_metadata(url, timeout=ASK_S)
    if not re.fullmatch(r"[\w-]+", about.etag or ""):
        return url, about, None
    return url, about, folder / repo_folder_name(repo_id=name.repository, repo_type="model") / "blobs" / str(about.etag)


def _download_blob(name: HubName, file: str, folder: Path) -> None:
    """Put a file's content where the hub's library looks for it, which would begin a broken download anew. Raises
    ModelError if the content has another hash than the hub says."""
    from huggingface_hub.constants import MAX_HTTP_DOWNLOAD_SIZE
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    url, about, blob = _blob(name, file, folder)  # asked now: where a large file lies is signed for an hour or so
    if blob is None or (about.size or 0) > MAX_HTTP_DOWNLOAD_SIZE:
        return  # the library fetches it
    blob.parent.mkdir(parents=True, exist_ok=True)
    headers = build_hf_headers()
    if urlsplit(about.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # our token is for the hub alone
    with locked(blob.with_suffix(".part")) as part:
        if blob.exists():  # another process was at it
            os.unlink(part.name)
            return
        there = part.seek(0, os.SEEK_END)
        http_get(
            about.location, part, resume_size=there, headers=headers, expected_size=about.size, displayed_filename=file
        )
        part.flush()
        with open(part.name, "rb") as whole:
            found = hashlib.file_digest(whole, "sha256").hexdigest()
        if len(blob.name) == len(found) and blob.name != found:  # of large files the ETag is the SHA-256
            os.unlink(part.name)
            raise ModelError(f"wrong checksum: {file} of {name} has sha256 {found}, not {blob.name}; fetch it again")
        os.rename(part.name, blob)


@contextmanager
def _in_words(name: HubName, folder: Path) -> Iterator[None]:
    """Everything that can go wrong with a hub, as one sentence. Raises ModelError."""
    import httpx2
    from huggingface_hub import errors
    from huggingface_hub.constants import ENDPOINT

    repository = name.repository
    unreachable = errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.XetDownloadError, httpx2.HTTPError
    try:
        yield
    except errors.GatedRepoError:
        raise ModelError(
            f"{repository} is gated: accept its terms at {ENDPOINT}/{repository}, and set HF_TOKEN to a token of yours"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"there is no folder {repository} here, and {ENDPOINT} has no such model, or it is private and HF_TOKEN "
            "does not let you in"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{repository} has no revision {name.revision!r}") from None
    except errors.HfHubHTTPError as error:
        kind = OutOfReachError if error.response.status_code in _PASSING else ModelError
        raise kind(f"{ENDPOINT} refuses {name}: {_answer(error)}") from None
    except errors.HFValidationError as error:
        raise ModelError(f"{name} is no name of a model: {error}") from None
    except unreachable as error:
        raise OutOfReachError(
            f"there is no folder {repository} here, the cache ({folder}) has no such model, and {ENDPOINT} cannot be "
            f"reached: {_first_line(error)}"
        ) from None
    except (OSError, ValueError) as error:  # the latter for what is too large for HTTP
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        other = f"{name} cannot be fetched into {folder}: {_first_line(error)}"
        raise OutOfReachError(_no_room(name, folder, "needs more than is free") if full else other) from None


def _answer(error: Any) -> str:
    code = error.response.status_code
    hint = {401: "; is HF_TOKEN right?", 403: "; HF_TOKEN does not allow it", 429: "; too many requests, try later"}
    return f"it answered {code}{hint.get(code, '')}"


def _first_line(error: BaseException) -> str:
    """Of the innermost cause: the hub's library wraps it in advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _no_room(name: HubName, folder: Path, problem: str) -> str:
    return f"no room on the disk of {folder}: {name} {problem}; {CACHE_VARIABLE} or HF_HOME moves the cache"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
