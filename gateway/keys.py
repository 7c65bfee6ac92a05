"""Who calls: API keys in a file, hashed. No RPC lives here, and no key is ever kept.

A line for each key: ID TENANT RIGHTS SHA256, rights with commas between; `#` begins a comment. A key is 256 random
bits, which nobody guesses however fast a guess is: a slow hash would only help to keep the gateway busy.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from protos.errors import Unauthenticated
from protos.watched import Watched

DEFAULT_TENANT = "default"
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TENANT_RULE = "a tenant's name has 1 to 64 of the characters A-Z a-z 0-9 . _ -"
_LINE = re.compile(r"(?P<id>[0-9a-f]{8}) (?P<tenant>\S+) (?P<rights>[a-z,]+) (?P<sha256>[0-9a-f]{64})")


class Right(StrEnum):
    GENERATE = "generate"  # requests of one's own tenant
    ADMIN = "admin"  # figures of the whole service, and everybody's requests


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: str
    rights: frozenset[Right]

    def may_see(self, tenant: str) -> bool:
        return tenant == self.tenant or Right.ADMIN in self.rights


ANYBODY = Caller(DEFAULT_TENANT, frozenset(Right))  # where no keys are asked for


@dataclass(frozen=True, slots=True)
class Entry:
    caller: Caller
    sha256: str


_NOBODY = Entry(Caller("", frozenset()), "0" * 64)  # compared with where the id is unknown, so that it takes as long


def new_key(tenant: str, rights: Iterable[Right]) -> tuple[str, str]:
    """A key, and the line that knows it. Raises ValueError for a name that is none."""
    if not _TENANT.fullmatch(tenant):
        raise ValueError(f"tenant: {_TENANT_RULE}")
    id = secrets.token_hex(4)
    key = f"laps_{id}_{secrets.token_urlsafe(32)}"
    return key, f"{id} {tenant} {','.join(rights)} {_sha256(key)}"


class Keys:
    """The keys of one file, read again whenever it changes."""

    def __init__(self, file: Path) -> None:
        """Raises ValueError if the file is of no use."""
        self._file = file
        self._entries = Watched([file], self._load)

    def caller(self, authorization: str) -> Caller:
        """Who sent this header, `Bearer KEY`. Raises Unauthenticated, which never repeats what was sent."""
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated("authorization: missing; send `Bearer KEY`")
        id = key.split("_")[1] if key.count("_") >= 2 else ""
        entry = self._entries.get().get(id, _NOBODY)
        if not hmac.compare_digest(_sha256(key), entry.sha256):
            raise Unauthenticated("authorization: the key is unknown, or no longer valid")
        return entry.caller

    def _load(self) -> dict[str, Entry]:
        try:
            return _entries(self._file.read_text())
        except OSError as error:
            raise ValueError(f"{self._file}: {error.strerror}") from error
        except ValueError as error:  # UnicodeDecodeError is one
            raise ValueError(f"{self._file}: {error}") from error


def _entries(text: str) -> dict[str, Entry]:
    """By id. Raises ValueError that names the line's number, not what it holds."""
    entries: dict[str, Entry] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (words := line.partition("#")[0].split()):
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
        entries[match["id"]] = Entry(Caller(match["tenant"], rights), match["sha256"])
    return entries


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()
