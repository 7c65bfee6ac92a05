"""Child processes that are started again when they die, and that never outlive this process. What they do is not
known here."""

import asyncio
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field

from laps_sd import die_with_parent
from protos.serving import first_of

EARLY_S = 30.0  # a death sooner than this counts as early; of a child that says when it has come up, each before that
MAX_EARLY_DEATHS = 5  # in a row; then the child is given up. As many starts may fail before the first one works
BAD_SETTINGS = 2  # exit code of a child that refuses its flags: it is given up at once
ENDED_BY_OTHERS = (0, -signal.SIGKILL, -signal.SIGTERM)  # never an early death
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 3.0
MOST_LINE_BYTES = 64 << 10  # of one line: what is longer is told in pieces
TAIL_LINES = 60  # torchrun prints forty lines of its own after the error that matters


class GaveUp(Exception):
    """A child does not come up; the message ends with its last lines. `hopeless`: it refuses its settings."""

    def __init__(self, message: str, *, hopeless: bool = False) -> None:
        super().__init__(message)
        self.hopeless = hopeless


@dataclass(frozen=True, slots=True)
class Command:
    """`environment`: added to this process's. `stop_s`: seconds between SIGTERM and SIGKILL. `up`: text of the line
    that the child prints once it has come up; no later death is an early one. `refused`: text of the line by which a
    program between us and the child tells that the child refused its settings. `left`: text of the line by which the
    child says that somebody else had it end, and that it is not to be started again."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    stop_s: float = 5.0
    up: bytes | None = None
    refused: bytes | None = None
    left: bytes | None = None


class Child:
    """One command, started again whenever it dies, until it is stopped. `emit` gets each line that it prints."""

    def __init__(self, command: Command, emit: Callable[[bytes], object]) -> None:
        self.name = command.name
        self.pid: int | None = None  # None while it does not run
        self.command = command
        self._emit = emit
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._is_up = False
        self._refuses = self._left = False
        self._stopping = asyncio.Event()
        self._replaced = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def gone(self) -> bool:
        """It does not run, and will not be started again."""
        return self._ended.is_set()

    @property
    def stopping(self) -> bool:
        """It is told to end, and will not be started again."""
        return self._stopping.is_set()

    def begin_to_stop(self) -> None:
        """SIGTERM, then SIGKILL after the command's `stop_s`. Returns at once."""
        self._stopping.set()

    async def stop(self) -> None:
        """The same, and returns when the process is gone."""
        self.begin_to_stop()
        await self._ended.wait()

    def replace(self, command: Command) -> None:
        """The process ends, and `command` runs in its place."""
        self.command = command
        self._replaced.set()

    async def keep_running(self) -> None:
        """Until stopped or cancelled. Raises GaveUp."""
        early_deaths = failed_starts = 0
        ran = False
        try:
            while not self._stopping.is_set():
                started = time.monotonic()
                self._replaced.clear()  # what is started now is the newest
                try:
                    async with self._running() as process:
                        ran, failed_starts = True, 0
                        await first_of(process.wait, self._stopping.wait, self._replaced.wait)
                except OSError as error:  # no memory or no room for a process just now
                    failed_starts += 1
                    self.say("child_not_started", reason=str(error))
                    if failed_starts == MAX_EARLY_DEATHS and not ran:  # else the machine is to blame, and may recover
                        raise GaveUp(f"{self.name} could not be started: {error}") from error
                else:
                    if self._stopping.is_set() or (self._left and not process.returncode):
                        return
                    if self._replaced.is_set():
                        continue
                    early_deaths = self._report_death(process.returncode, time.monotonic() - started, early_deaths)
                doublings = min(early_deaths + failed_starts, MAX_EARLY_DEATHS)
                backoff_s = min(FIRST_BACKOFF_S * 2**doublings, MAX_BACKOFF_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), backoff_s)
        finally:
            self._ended.set()

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[asyncio.subprocess.Process]:
        """The process, whose lines go to `emit`. When the block ends, the process has ended."""
        # With a pipe of asyncio's `process.wait` returns only when nobody has that pipe open any more. So a process
        # that the dead one has started would keep it from being started again.
        ours, its = (os.fdopen(end, mode, 0) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
        output = asyncio.StreamReader()
        with ours, its:
            pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(output), ours
            )
            with closing(pipe):
                process = await asyncio.create_subprocess_exec(
                    *leashed(self.command.arguments),
                    env={**os.environ, **self.command.environment},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=its,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches this process alone, which stops its children in order
                )
                its.close()
                self.pid, self._is_up = process.pid, False
                pump = asyncio.create_task(self._pump(output), name=f"output of {self.name}")
                try:
                    yield process
                finally:
                    await end(process, self.command.stop_s)
                    self.pid = None
                    with suppress(TimeoutError):
                        await asyncio.wait_for(pump, 1.0)

    async def _pump(self, output: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await output.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) >= MOST_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._tail.append(line)
                self._is_up = self._is_up or (self.command.up is not None and self.command.up in line)
                self._refuses = self._refuses or (self.command.refused is not None and self.command.refused in line)
                self._left = self._left or (self.command.left is not None and self.command.left in line)
                self._emit(line + b"\n")
        if rest:
            self._tail.append(rest)
            self._emit(rest + b"\n")

    def _report_death(self, code: int | None, lived_s: float, early_deaths: int) -> int:
        """Returns how many early deaths in a row there are with this one. Raises GaveUp if that is one too many."""
        self.say("child_died", code=code, lived_s=round(lived_s, 1))
        if code == BAD_SETTINGS or self._refuses:
            raise GaveUp(f"{self.name} refuses its settings (exit code 2): {self._reason()}", hopeless=True)
        young = lived_s < EARLY_S or self.command.up is not None
        if not young or self._is_up or code in ENDED_BY_OTHERS:
            return 0
        if early_deaths + 1 == MAX_EARLY_DEATHS:
            raise GaveUp(self._last_words(code))
        return early_deaths + 1

    def say(self, event: str, **words: object) -> None:
        """One line about this child, beside those that it prints."""
        entry = {"service": "up", "child": self.name, **words, "event": event}
        self._emit(json.dumps(entry).encode() + b"\n")

    def _reason(self) -> str:
        """The last line that is no entry of a log: a program that refuses its settings says why in such a line. Of one
        behind torchrun, which says more after it, the last that a worker says."""
        said = [line for line in self._tail if line.strip() and not line.startswith((b"{", b"  ", b"="))]
        said = [line for line in said if line.startswith((b"worker: ", b"worker, "))] or said
        return said[-1].decode(errors="replace") if said else "it does not say why"

    def _last_words(self, code: int | None) -> str:
        when = "before it had come up" if self.command.up else f"in its first {EARLY_S:g} s"
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        tail = b"\n".join(self._tail).decode(errors="replace")
        return f"{self.name} ended {MAX_EARLY_DEATHS} times, each {when}, with {how}. Its last lines:\n{tail}"


async def end(process: asyncio.subprocess.Process, timeout_s: float, first: int = signal.SIGTERM) -> None:
    """`first`, then SIGKILL: after `timeout_s`, or at once if this call is cancelled."""
    if process.returncode is not None:
        return
    try:
        with suppress(ProcessLookupError):
            process.send_signal(first)
        await asyncio.wait_for(process.wait(), timeout_s)
    except (TimeoutError, asyncio.CancelledError) as impatience:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()  # nothing withstands SIGKILL
        if isinstance(impatience, asyncio.CancelledError):
            raise


def leashed(command: Sequence[str], parent: int | None = None) -> list[str]:
    """The command that runs `command` so that it is killed when its parent ends, however that ends.

    `parent`: process id of the parent. None: this process; 0: the process that runs the command, whichever it is.
    """
    owner = os.getpid() if parent is None else parent
    return [sys.executable, "-I", "-S", die_with_parent.__file__, str(owner), *command]
