"""The model's thread: rounds of the newest command, one after the other, without waiting for anybody. No RPC here.

Everything that touches the engine happens in this one thread. Others hand it commands and get reports.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from worker_service.engine.engine import Engine
from worker_service.engine.profile import measure
from worker_service.engine.refine import RefinedProfile
from worker_service.engine.types import CostProfile, Held, Limits, Run, Sampling, StepResult
from worker_service.pace import Pace

_MAX_PENDING = 1024  # commands that came during one round; a scheduler sends few


class TooManyCommandsError(Exception):
    """Far more commands than rounds: whoever sends them is not a scheduler that follows the protocol."""


@dataclass(frozen=True, slots=True)
class Admission:
    request_id: str
    placement: int
    tokens: Sequence[int]
    prompt_len: int
    sampling: Sampling
    limits: Limits
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """The rank is desired state: the newest one counts. What is admitted, given up and forgotten is said once."""

    seq: int
    seen_step: int
    rank: Sequence[Run]
    admit: Sequence[Admission] = ()
    drop: Sequence[str] = ()
    offload: Sequence[str] = ()
    forget: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """One round. Seconds: `other_s` is all of it but drafting and the forward pass, `idle_s` the wait before it."""

    step: int
    command_seq: int
    result: StepResult
    other_s: float
    idle_s: float
    cost: CostProfile | None = None  # if it has changed since it was last reported


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What the model's thread is at, and in how many seconds it should be done; None: nobody knows, it warms up."""

    expected_s: float | None


@dataclass(slots=True)
class _Session:
    """What lives as long as one connection."""

    max_lag: int
    report: Callable[[Report], None]
    step: int = 0
    command: Command | None = None  # the standing one
    exhausted: bool = False  # its last round got nowhere: only another command can change that

    @property
    def allowed(self) -> bool:
        """At most `max_lag` rounds beyond the last report that the standing command has seen."""
        return self.command is not None and self.step - self.command.seen_step < self.max_lag


class Runner:
    """Owns the engine. `attach` and `detach` frame a connection; between them rounds run as commands say."""

    def __init__(self, engine: Engine, slots: int, threads: int, pace: Pace | None = None) -> None:
        """`threads`: of torch in the model's thread; 0: all cores."""
        self._engine, self._slots, self._threads = engine, slots, threads
        self._pace = pace or Pace()
        self._wake = threading.Condition()
        self._pending: deque[Command] = deque()  # not yet applied, oldest first
        self._session: _Session | None = None
        self._detaching: list[Future[list[Held]]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine")
        self.warmed: Future[CostProfile] = Future()
        self.ended: Future[None] = Future()  # by stop(), or by what the engine raised
        self.task: Task | None = None  # None: it waits

    @property
    def cost(self) -> CostProfile:
        """As the rounds so far have shown it. The model must be warmed."""
        return self._profile.cost

    def start(self) -> None:
        self.task = Task(None)
        self._thread.start()

    def attach(self, max_lag: int, report: Callable[[Report], None]) -> None:
        """Obey the commands of a new connection. `report` is called in the model's thread after each round."""
        with self._wake:
            self._pending.clear()
            self._session = _Session(max(max_lag, 1), report)

    def detach(self) -> Future[list[Held]]:
        """All commands are void, no further round begins; the future ends after the round in hand. KV stays."""
        held: Future[list[Held]] = Future()
        with self._wake:
            self._session = None
            self._pending.clear()
            if self.ended.done():
                held.set_result([])
            else:
                self._detaching.append(held)
                self._wake.notify()
        return held

    def post(self, command: Command) -> None:
        """For the next round boundary. Raises TooManyCommandsError."""
        with self._wake:
            if len(self._pending) >= _MAX_PENDING:
                raise TooManyCommandsError(f"{_MAX_PENDING} commands during one round")
            self._pending.append(command)
            self._wake.notify()

    def stop(self) -> None:
        """Ends the thread after the round in hand; `ended` tells when."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def _main(self) -> None:
        failure: BaseException | None = None
        try:
            self._engine.bind_thread(self._threads)
            measured = self._pace.profile(measure(self._engine, self._slots))
            self._profile = RefinedProfile(measured)
            self.warmed.set_result(measured)
            self._run()
        except BaseException as error:
            failure = error
        self.task = None
        with self._wake:
            for held in self._detaching:
                _answer(held, [])
            if failure is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(failure)
        if not self.warmed.done():
            self.warmed.set_exception(failure or RuntimeError("stopped"))

    def _run(self) -> None:
        free_since = perf_counter()  # since when the model has nothing to do
        while (turn := self._next_turn(free_since)) is not None:
            session, command, begun, idle_s = turn
            runs = command.rank[: self._slots]
            drafts, prefill = [run.draft_len for run in runs], sum(run.prefill_tokens for run in runs)
            self.task = Task(self.cost.round_s(drafts, prefill))
            result, free_since = self._pace.hold(begun, self._engine.step(command.rank, self._slots))
            session.step += 1
            session.exhausted = not result.ran
            other_s = free_since - begun - result.draft_s - result.verify_s
            cost = self._profile.observe(result)
            session.report(Report(session.step, command.seq, result, other_s, idle_s, cost))

    def _next_turn(self, begun: float) -> tuple[_Session, Command, float, float] | None:
        """Wait until a round may run: its session and command, when it began, the seconds idle. None: stop.

        `begun`: the end of the round before, which is where the next one begins if nothing has to be waited for.
        """
        idle_s = 0.0
        while True:
            self.task = Task(0.0)
            with self._wake:
                if self._stopping:
                    return None
                session, commands, detaching = self._session, list(self._pending), self._detaching
                self._pending.clear()
                self._detaching = []
            for held in detaching:
                _answer(held, self._engine.held())
            runnable = False
            if session is not None:
                for command in commands:
                    self._apply(session, command)
                runnable = self._runnable(session)
                if runnable and session.command is not None and session.allowed:
                    return session, session.command, begun, idle_s
            self.task, waited_from = None, perf_counter()
            with self._wake:
                self._wake.wait_for(partial(self._news, session))
            begun = perf_counter()
            if runnable:  # idle: it could run, and was not allowed to
                idle_s += begun - waited_from

    def _news(self, known: _Session | None) -> bool:
        return bool(self._stopping or self._pending or self._detaching or self._session is not known)

    def _apply(self, session: _Session, command: Command) -> None:
        """Every edit counts, in order; of the ranks only the newest."""
        for request_id in command.forget:
            self._engine.forget(request_id)
        for request_id in command.drop:
            self._engine.drop(request_id)
        for request_id in command.offload:  # now the others have given back what they had in the host's memory
            self._engine.offload(request_id)
        for a in command.admit:
            self._engine.admit(a.request_id, a.placement, a.tokens, a.prompt_len, a.sampling, a.limits, a.tenant)
        same_rank = session.command is not None and session.command.rank == command.rank
        if command.forget or command.drop or command.offload or command.admit or not same_rank:
            session.exhausted = False  # else nothing that could make it run has changed
        session.command = command
        if not command.rank:  # the scheduler may wait for the end of what the commands before it listed
            done = StepResult((), self._engine.free_blocks, 0.0, 0.0, 0.0)
            session.report(Report(session.step, command.seq, done, 0.0, 0.0))

    def _runnable(self, session: _Session) -> bool:
        if session.command is None or session.exhausted:
            return False
        return any(self._engine.runnable(run) for run in session.command.rank)


def _answer(future: Future[list[Held]], held: list[Held]) -> None:
    if future.set_running_or_notify_cancel():  # who asked may have given up
        future.set_result(held)
