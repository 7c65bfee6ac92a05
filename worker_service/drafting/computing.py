"""The model's thread: what sessions say is applied between two passes, and passes run while a guess is wanted. No RPC.

Everything that touches the model happens in this one thread. The event loop hands it edits and gets guesses.
"""

import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from worker_service.drafting.tally import Tally
from worker_service.drafting.texts import Guess, Name, Wish
from worker_service.watchdog import Task

if TYPE_CHECKING:  # it brings torch along, and settings are read without
    from worker_service.drafting.passes import Passes

NOTHING = array("i")  # it stays so


class Edit(NamedTuple):
    """What a session says of one text. Without a wish the text is over."""

    handle: int
    start: int = 0
    tokens: "array[int]" = NOTHING
    wish: Wish | None = None
    salt: str = ""


Told = list[tuple[Name, Guess]]


@dataclass(slots=True)
class _Said:
    session: int
    edits: Sequence[Edit] | None  # None: the session is over
    applied: Future[None] = field(default_factory=Future)


class Computing:
    """Owns the passes. `started` tells what a token costs (Passes.cost), once that is measured."""

    def __init__(self, passes: "Passes", threads: int, tell: Callable[[Told], None]) -> None:
        """`threads`: of torch, 0: all cores. `tell` is called in the model's thread, after a pass or an edit."""
        self._passes, self._threads, self._tell = passes, threads, tell
        self._wake = threading.Condition()
        self._said: list[_Said] = []  # at most one for each session: it waits until that is applied
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="drafting")
        self.started: Future[tuple[float, float]] = Future()
        self.ended: Future[None] = Future()  # by stop(), or by what the model raised
        self.task: Task | None = None  # for the watchdog; None: it waits
        self.tally = Tally()

    def start(self) -> None:
        self.task = Task(None)
        self._thread.start()

    def edit(self, session: int, edits: Sequence[Edit]) -> Future[None]:
        """To be applied before the next pass begins; the result tells when it is."""
        return self._say(_Said(session, edits))

    def end(self, session: int) -> Future[None]:
        """Its texts and their KV go."""
        return self._say(_Said(session, None))

    def stop(self) -> None:
        """End the thread after the pass in hand; `ended` tells when."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def _say(self, said: _Said) -> Future[None]:
        with self._wake:
            self._said.append(said)
            self._wake.notify()
        return said.applied

    # ---- in the model's thread ----

    def _main(self) -> None:
        try:
            if self._threads:
                import torch

                torch.set_num_threads(self._threads)
            cost = self._passes.cost()
            self.tally.free_blocks = self._passes.texts.pool.free_blocks
            self.started.set_result(cost)
            self._run(expected_s=cost[0])
        except BaseException as error:
            if not self.started.done():
                self.started.set_exception(error)
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)
        self.task = None

    def _run(self, expected_s: float) -> None:
        idle = True
        while True:
            with self._wake:
                if idle:
                    self.task = None
                    self._wake.wait_for(lambda: self._said or self._stopping)
                if self._stopping:
                    return
                said, self._said = self._said, []
            self.task = Task(expected_s)
            told: Told = []
            for each in said:
                told += self._apply(each)
                if each.applied.set_running_or_notify_cancel():  # who waited may have given up
                    each.applied.set_result(None)
            begun = perf_counter()
            made = self._passes.run()
            idle = made is None
            told += made or []
            self._count(perf_counter() - begun, ran=not idle)
            if told:
                self._tell(told)

    def _apply(self, said: _Said) -> Told:
        texts, told = self._passes.texts, []
        if said.edits is None:
            texts.forget_all(said.session)
            return []
        for handle, start, tokens, wish, salt in said.edits:
            name = Name(said.session, handle)
            if wish is None:
                texts.forget(name)
            elif (guess := texts.learn(name, start, tokens, wish, salt)) is not None:
                told.append((name, guess))
        return told

    def _count(self, took_s: float, *, ran: bool) -> None:
        tally = self.tally
        if ran:
            tally.passes += 1
            tally.busy_s += took_s
        tally.guesses, tally.caught_up = self._passes.guessed, self._passes.caught_up
        tally.texts, tally.free_blocks = len(self._passes.texts.by_name), self._passes.texts.pool.free_blocks
