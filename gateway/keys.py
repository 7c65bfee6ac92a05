"""API keys in a file, hashed: they say which tenant calls, with which rights. No RPC lives here; no key is ever kept.

Each line is ID TENANT RIGHTS SHA256, the rights separated by commas; `#` begins a comment. A key is 256 random bits,
too many to guess at any speed. So the hash is a fast one: a slow hash would only let strangers keep the gateway busy.
"""

import hashlib
import hmac
import io
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gateway.rights import Right as Right
from protos.errors import Unauthenticated
from protos.watched import Watched

DEFAULT_TENANT = "default"
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TENANT_RULE = "a tenant's name has 1 to 64 of the characters A-Z a-z 0-9 . _ -"
_LINE = re.compile(r"(?P<id>[0-9a-f]{8}) (?P<tenant>\S+) (?P<rights>[a-z,]+) (?P<sha256>[0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: str
    rights: frozenset[Right]

    def may_see(self, tenant: str) -> bool:
        return tenant == self.tenant or Right.ADMIN in self.rights


ANYBODY = Caller(DEFAULT_TENANT, frozenset(Right))  # the caller where no keys are configured


@dataclass(frozen=True, slots=True)
class Entry:
    caller: Caller
    sha256: str


_NOBODY = Entry(Caller("", frozenset()), "0" * 64)  # stands in for an unknown id, so that refusing it takes as long


def new_key(tenant: str, rights: Iterable[Right]) -> tuple[str, str]:
    """A new key, and the line for the file. Raises ValueError if `tenant` is no valid name."""
    if not _TENANT.fullmatch(tenant):
        raise ValueError(f"tenant: {_TENANT_RULE}")
    id = secrets.token_hex(4)
    key = f"laps_{id}_{secrets.token_urlsafe(32)}"
    return key, f"{id} {tenant} {','.join(rights)} {_sha256(key)}"


class Keys:
    """The keys of one file, which is read again when it changes."""

    def __init__(self, file: Path) -> None:
        """Raises ValueError if the file cannot be read or has a wrong line."""
        self._file = file
        self._entries = Watched([file], self._load)

    def caller(self, authorization: str) -> Caller:
        """Who sent this header, `Bearer KEY`. Raises Unauthenticated, which never repeats what was sent."""
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated("authorization: missing; send `Bearer KEY`")
        id = key.split("_")[1] if key.count("_") >= 2 else ""
        entry = self.entry(id)
        if not hmac.compare_digest(_sha256(key), entry.sha256):
            raise Unauthenticated("authorization: the key is unknown, or no longer valid")
        return entry.caller

    def entry(self, id: str) -> Entry:
        """The entry of this id as the file has it now; of an unknown id one that has no rights."""
        return self._entries.get().get(id, _NOBODY)

    def _load(self) -> dict[str, Entry]:
        try:
            return {id: entry for id, (entry, _) in read_entries(self._file.read_text()).items()}
        except OSError as error:
            raise ValueError(f"{self._file}: {error.strerror}") from error
        except ValueError as error:  # UnicodeDecodeError is one
            raise ValueError(f"{self._file}: {error}") from error


def read_entries(text: str) -> dict[str, tuple[Entry, str]]:
    """The entries by id, each with the comment on its line. Raises ValueError, which names the line by its number and
    never repeats its text."""
    entries: dict[str, tuple[Entry, str]] = {}
    for number, line in enumerate(_lines(text), 1):
        said, _, comment = line.partition("#")
        if not (words := said.split()):
            continue
        match = _LINE.fullmatch(" ".join(words))
        if match is None:
            raise ValueError(f"line {number}: must be ID TENANT RIGHTS SHA256, as `laps-sd key new` prints it")
        if not _TENANT.fullmatch(match["tenant"]):
            raise ValueError(f"line {number}: {_TENANT_RULE}")
        try:
            rights = frozenset(map(Right, match["rights"].split(",")))
        except ValueError:
            raise ValueError(f"line {number}: rights are {', '.join(Right)}") from None
        if match["id"] in entries:
            raise ValueError(f"line {number}: a key of this id came before")
        entries[match["id"]] = Entry(Caller(match["tenant"], rights), match["sha256"]), comment.strip()
    return entries


def without(text: str, id: str) -> str:
    """The file's text without the line of this id; every other line stays as it is, comments and line ends too. Raises
    ValueError if there is no such line, or another one is wrong."""
    if id not in read_entries(text):
        raise ValueError(f"there is no key {id!r}")
    return "".join(line for line in _lines(text) if line.partition("#")[0].split()[:1] != [id])


def _lines(text: str) -> Iterable[str]:
    """With their ends, as editors show them: str.splitlines cuts at more characters, which may be in a comment."""
    return io.StringIO(text, newline="")


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()
