"""The model's thread: step after step of the newest command's schedule, without waiting for anybody. No RPC here.

Everything that touches the engine happens in this one thread. Others hand it commands and get reports.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from worker_service.engine.cost_model import CostModel
from worker_service.engine.port import EnginePort
from worker_service.engine.types import Admission, CostProfile, Held, Run, StepResult
from worker_service.engine.warm_up import Measured, measure
from worker_service.reporting import Report, Reporter, Seconds
from worker_service.tally import Tally
from worker_service.watchdog import Task

# Rounds of a request that are not reported yet. After so many the scheduler takes it that a suspect is innocent.
MOST_UNREPORTED = 8
_MAX_PENDING = 1024  # commands that came during one step; a scheduler sends few


class TooManyCommandsError(Exception):
    """Far more commands than steps: the sender is not a scheduler that follows the protocol."""


@dataclass(frozen=True, slots=True)
class Command:
    """The schedule is desired state: that of the newest command counts. What else a command says is said once."""

    seq: int
    seen_step: int
    schedule: Sequence[Run]
    admit: Sequence[Admission] = ()
    drop: Sequence[str] = ()
    offload: Sequence[str] = ()
    forget: Sequence[str] = ()
    report_within_s: float = 0.0  # a round that merely goes on may wait so long for its report; 0: none waits


@dataclass(slots=True)
class _Session:
    """What lives as long as one connection."""

    max_lag: int
    reporter: Reporter
    step: int = 0
    command: Command | None = None  # the newest one
    exhausted: bool = False  # its last step got nowhere: only another command can change that

    @property
    def allowed(self) -> bool:
        """At most `max_lag` steps beyond the last report that the newest command has seen."""
        return self.command is not None and self.step - self.command.seen_step < self.max_lag


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that may run: when it began, by perf_counter(), and the seconds before it with work but no permission."""

    session: _Session
    command: Command
    begun: float
    idle_s: float


class Runner:
    """Owns the engine. `attach` and `detach` frame a connection; between them steps run as commands say."""

    def __init__(self, engine: EnginePort, slots: int, threads: int) -> None:
        """`slots`: requests that run in one step. `threads`: of torch in the model's thread; 0: all cores."""
        self._engine, self.slots, self._threads = engine, slots, threads
        self._wake = threading.Condition()
        self._pending: deque[Command] = deque()  # not yet applied, oldest first
        self._session: _Session | None = None
        self._served: _Session | None = None  # the one that the model's thread knows
        self._detaching: list[Future[list[Held]]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine")
        self.warmed: Future[CostProfile] = Future()
        self.ended: Future[None] = Future()  # by stop(), or by what the engine raised
        self.task: Task | None = None  # None: it waits
        self.tally = Tally()

    @property
    def cost(self) -> CostProfile:
        """What steps cost, by all that ran so far. The model must be warmed."""
        return self._costs.profile

    def start(self) -> None:
        """Begin with the warm-up; `warmed` tells when it is done."""
        self.task = Task(None)
        self._thread.start()

    def attach(self, max_lag: int, report: Callable[[Report], None]) -> None:
        """Obey the commands of a new connection. At most `max_lag` steps may run beyond the last report that a command
        has seen. `report` is called in the model's thread, with a quarter as many rounds of a request at most."""
        with self._wake:
            self._pending.clear()
            self._session = _Session(max(max_lag, 1), Reporter(report, min(max(max_lag // 4, 1), MOST_UNREPORTED)))

    def detach(self) -> Future[list[Held]]:
        """All commands are void. The result, after the step in hand, tells which requests stay and their KV."""
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
        """To be applied before the next step begins. Raises TooManyCommandsError."""
        with self._wake:
            if len(self._pending) >= _MAX_PENDING:
                raise TooManyCommandsError(f"{_MAX_PENDING} commands during one step")
            self._pending.append(command)
            self._wake.notify()

    def stop(self) -> None:
        """End the thread after the step in hand; `ended` tells when."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    # ---- in the model's thread ----

    def _main(self) -> None:
        failure: BaseException | None = None
        try:
            self._engine.bind_thread(self._threads)
            measured = self._measure()
            self._costs = CostModel(*measured)
            self._engine.weigh_drafts(self._costs.passes)
            self.warmed.set_result(measured.profile)
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

    def _measure(self) -> Measured:
        return measure(self._engine, self.slots)

    def _run(self) -> None:
        ended = perf_counter()
        while (step := self._next_step(ended)) is not None:
            schedule = step.command.schedule
            runs = schedule[: self.slots]
            drafts, prefill = [run.draft_len for run in runs], sum(run.prefill_tokens for run in runs)
            self.task = Task(self.cost.step_s(drafts, prefill))
            result, ended = self._step(schedule, step.begun)
            self._done(step, result, ended)

    def _step(self, schedule: Sequence[Run], begun: float) -> tuple[StepResult, float]:
        """Run a step that began at `begun`: its result, and when it ended."""
        return self._engine.step(schedule, self.slots), perf_counter()

    def _done(self, step: _Step, result: StepResult, ended: float) -> None:
        session, took_s = step.session, ended - step.begun
        session.step += 1
        session.exhausted = not result.ran
        other_s = took_s - result.draft_s - result.verify_s - result.wait_s
        cost = self._costs.observe(result)
        seconds = Seconds(result.draft_s, result.verify_s, other_s, step.idle_s, result.wait_s)
        self.tally.add(result, seconds)
        last = Report(session.step, step.command.seq, result.free_blocks, seconds=seconds, cost=cost)
        session.reporter.add(last, result.rows, ended, took_s, step.command.report_within_s)

    def _next_step(self, begun: float) -> _Step | None:
        """Wait until a step may run. None: stop.

        `begun`: the end of the step before, which is where the next one begins if nothing has to be waited for.
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
            if self._served is not None and self._served is not session:
                self._served.reporter.flush()
            self._served = session
            for held in detaching:
                _answer(held, self._engine.held())
            runnable = False
            if session is not None:
                for command in commands:
                    self._apply(session, command)
                runnable = self._runnable(session)
                if runnable and session.command is not None and session.allowed:
                    return _Step(session, session.command, begun, idle_s)
                session.reporter.flush()
            self.task, waited_from = None, perf_counter()
            with self._wake:
                self._wake.wait_for(partial(self._news, session))
            begun = perf_counter()
            if runnable:  # idle: there was work, but no permission to do it
                idle_s += begun - waited_from

    def _news(self, known: _Session | None) -> bool:
        return bool(self._stopping or self._pending or self._detaching or self._session is not known)

    def _apply(self, session: _Session, command: Command) -> None:
        """Edits count in order, each of them; of the schedules only the newest."""
        for request_id in command.forget:
            self._engine.forget(request_id)
        for request_id in command.drop:
            self._engine.drop(request_id)
        for request_id in command.offload:  # after the others have given back their room in the host's memory
            self._engine.offload(request_id)
        for admission in command.admit:
            self._engine.admit(admission)
        same_schedule = session.command is not None and session.command.schedule == command.schedule
        if command.forget or command.drop or command.offload or command.admit or not same_schedule:
            session.exhausted = False  # else nothing that could make a request run has changed
        session.command = command
        if self.tally.free_blocks is not None:
            self.tally.free_blocks = self._engine.free_blocks  # perhaps no step follows that would tell it
        if not command.schedule:  # the scheduler may wait for the end of what earlier commands listed
            session.reporter.answer(command.seq, self._engine.free_blocks)

    def _runnable(self, session: _Session) -> bool:
        if session.command is None or session.exhausted:
            return False
        return any(self._engine.runnable(run) for run in session.command.schedule)


def _answer(future: Future[list[Held]], held: list[Held]) -> None:
    if future.set_running_or_notify_cancel():  # whoever asked may have given up
        future.set_result(held)
