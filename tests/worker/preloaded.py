"""Workers as processes of their own, without each loading torch again: they are forked off a process that has loaded
it, and has computed nothing yet."""

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_START = multiprocessing.get_context("forkserver")


class Worker:
    """`python -m worker_service` with these arguments, in this process's environment with `environment` added. What it
    prints goes to the file `said`."""

    def __init__(self, arguments: Sequence[str], said: Path, environment: Mapping[str, str] | None = None) -> None:
        self._said = said
        _START.set_forkserver_preload(["worker_service.own_engine"])
        whole = {**os.environ, **(environment or {})}
        self._process = _START.Process(target=_main, args=(list(arguments), str(said), whole), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> int:
        """Its exit code, once it has ended."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        assert code is not None, f"it still runs: {self.said()}"
        return code

    def running(self) -> bool:
        return self._process.is_alive()

    def said(self) -> str:
        return self._said.read_text() if self._said.exists() else ""


def _main(arguments: list[str], said: str, environment: dict[str, str]) -> None:
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["worker_service", *arguments]
    from worker_service.__main__ import main
    from worker_service.loading import leave

    leave(main())
