"""All of LAPS-SD that one vLLM has: what it learns, what it orders, what it tells. It knows nothing of vLLM, and what
takes long is left to the background."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

from laps_sd_vllm import status as statuses
from laps_sd_vllm.background import Background
from laps_sd_vllm.learning import Learning
from laps_sd_vllm.ordering import Engine, Ordering
from laps_sd_vllm.requests import Live
from laps_sd_vllm.settings import KEY, Settings
from laps_sd_vllm.status import Status
from laps_sd_vllm.steps import Desired, StepDone
from laps_sd_vllm.versions import Unsupported
from laps_sd_vllm.watching import Comparison, Watch
from scheduler_service.core.beliefs import Acceptance
from scheduler_service.core.costs import CostProfile
from scheduler_service.core.policies import gittins, policy_name
from scheduler_service.core.types import Request
from scheduler_service.predictor import installed
from scheduler_service.predictor.port import Features
from scheduler_service.predictor.window import hashed
from scheduler_service.sim.worker import SimFleet
from worker_service.engine.cost_model import CostModel
from worker_service.engine.types import CostProfile as Measured

# The assumed costs of steps until they are measured, in seconds: a model of some billions of parameters on a GPU.
START = Measured(0.0, 0.02, 0.0002, 0.0001, 0.0001)
KNOWN_STEPS = 64  # after so many their costs are believed
COSTS_EVERY = 8  # running requests: with so many more, steps teach costs one step less often
STATUS_S = 5.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Shared costs. `step_tokens`: of prompts, in one step; `steps_ahead`: scheduled before a step's output."""

    slots: int
    blocks: int
    block_tokens: int
    drafts: int
    step_tokens: int
    steps_ahead: int


class Advice:
    """`learned`: file; None: none. `served`: as in Learning. `blocks_of`: as in Ordering. `say`: a line for the log."""

    def __init__(
        self,
        settings: Settings,
        capacity: Capacity,
        *,
        learned: Path | None,
        served: str,
        status_file: Path,
        blocks_of: Callable[[str], int],
        say: Say,
    ) -> None:
        self._settings, self._log, self._file = settings, say, status_file
        online = settings.predictor == "online"
        if online and not installed():
            told = "needs scipy and threadpoolctl: pip install 'laps-sd-vllm[predictor]', or set it to none"
            raise Unsupported(f"{KEY}.predictor {told}")
        self._background = Background()
        policy = settings.make_policy()
        name = ":".join([policy_name(policy), *settings.policy_set])
        draft_len = {"all": capacity.drafts, "auto": None}.get(str(settings.draft_len), settings.draft_len)
        assert not isinstance(draft_len, str)
        draft_len = draft_len if draft_len is None else min(draft_len, capacity.drafts)
        self.status = Status(settings.mode, name)
        self.learning = Learning(self._background, learned, online, served, capacity.drafts, self._say)
        fleet = SimFleet(
            capacity.slots, 1, draft_len, kv_budget_tokens=capacity.blocks * capacity.block_tokens,
            plan_lag=capacity.steps_ahead, prefill_chunk=capacity.step_tokens, foresight=True,
        )  # fmt: skip
        self.watch = Watch(self._background, fleet, name, settings.compare_every_s)
        self._costs, self._cost_steps = CostModel(START), 0
        self.ordering: Ordering | None = None
        if settings.mode == "order":
            engine = Engine(
                capacity.slots,
                capacity.blocks,
                capacity.block_tokens,
                capacity.drafts,
                capacity.step_tokens,
                _of_core(START),
            )
            self.ordering = Ordering(policy, engine, draft_len, blocks_of, 0.0)
            known = self.ordering.core.fleet.known
            known.length, known.acceptance = self.learning.length, self.learning.acceptance
            for twentieths in range(1, 61):
                gittins.rank(1.0, twentieths / 20)  # its tables take milliseconds each to make
        self._last_done, self._status_at, self._steps, self._closed = 0.0, 0.0, 0, False
        self._failed: dict[str, str] = {}  # by job: what was said of it last
        statuses.clean(status_file.parent)
        with suppress(OSError):  # of a server that was killed, whose process had this number
            status_file.unlink()

    def _say(self, line: str) -> None:
        self._log(f"LAPS-SD: {line}")

    # ---- what happened ----

    def submitted(self, request: Request, features: Features, bad_hint: bool, now: float) -> None:
        self.status.bad_hints += bad_hint
        row = hashed(features) if self.learning.predictor is not None else None
        if row is not None:
            request = replace(request, expected=self.learning.expect(row))
        self.watch.submitted(request, row)
        if self.ordering is not None:
            self.ordering.submitted(request, now)

    def cancelled(self, id: str, now: float, *, stopped: bool) -> None:
        """`stopped`: it has stop strings, so if it has any text it came to one of them, rather than that its client
        left."""
        live = self.watch.gone(id)
        if self.ordering is not None:
            self.ordering.cancelled(id, now)
        if stopped and live is not None and live.emitted:
            self.watch.ended(live, now)
            self._lesson(live)
            self._finished(live, now)
        self._write_at_rest()

    def step(self, done: StepDone, now: float) -> None:
        """A step is over."""
        seconds = done.done_at - max(done.scheduled_at, self._last_done)
        self._last_done = done.done_at
        self._observe_costs(done, seconds)
        if self.ordering is not None:
            self.ordering.step(done, seconds, now)
        ended = self.watch.step(done, now)
        for live in ended:
            if self.ordering is None and live.emitted:  # else the core has learned this
                self._lesson(live)
            self._finished(live, now)
        self._fetch()
        if self._settings.compare and self._cost_steps >= KNOWN_STEPS:  # else it would be of an assumed machine
            self.watch.compare(_of_core(self._costs.profile), now, monotonic, self._compared)
        if ended:
            self._write_at_rest()
        if now >= self._status_at and self._background.start("status", self._write_status):
            self._status_at = now + STATUS_S

    def _write_at_rest(self) -> None:
        """Where no request is left no step may follow for long, so the status is not left to the next one."""
        if not self.watch.live:
            self._background.start("status at rest", self._write_status)

    def _observe_costs(self, done: StepDone, seconds: float) -> None:
        self._steps += 1
        ran = [row for row in done.rows if not row.evicted]
        if not ran or seconds <= 0 or self._steps % max(1, len(ran) // COSTS_EVERY):
            return
        prefilled = sum([row.prefilled for row in ran])
        changed = self._costs.observe_sums([row.drafted for row in ran], prefilled, 0.0, seconds)
        self._cost_steps += 1
        if self.ordering is None:
            return
        if changed is not None:
            self.ordering.costs(_of_core(changed))
        if self._cost_steps == KNOWN_STEPS:
            self.ordering.recost(_of_core(self._costs.profile))

    def _lesson(self, live: Live) -> None:
        """For all later requests."""
        learning = self.learning
        learning.length.observe(live.emitted, live.request.predicted_tokens, cut=live.cut)
        learning.acceptance.observe(Acceptance(len(live.rounds), live.drafted, live.accepted, live.rejected))

    def _finished(self, live: Live, now: float) -> None:
        self.status.finished += 1
        self.learning.finished(live.row, live.emitted, live.drafted, live.accepted, cut=live.cut, now=now)

    def _fetch(self) -> None:
        for name, value, error in self._background.results():
            if name == "fit":
                self.learning.fitted(value, error)
            elif name == "compare" and error is None:
                self.watch.compared(value)
            elif error is not None and self._failed.get(name) != str(error):  # else it is known
                self._failed[name] = str(error)
                self._say(f"{name} failed: {error}")
        if self.learning.predictor is not None:
            self.status.predictor = self.learning.predictor.status.word

    # ---- what to do ----

    def plan(self) -> tuple[tuple[str, ...], Desired] | None:
        """As Ordering.plan; None also where nothing is ordered."""
        return self.ordering.plan() if self.ordering is not None else None

    def planned(self, seconds: float, *, late: bool) -> None:
        self.status.plans += 1
        self.status.planning_s += seconds
        self.status.late_plans += late

    # ---- what is told ----

    def fell_back(self, why: str) -> None:
        self.status.fallbacks, self.status.why, self.ordering = 1, why, None
        self._background.start("last status", self._write_status)
        self.learning.leave()

    def _compared(self, comparison: Comparison) -> None:
        """In a thread of the background, so that it is told even where no step follows."""
        self.status.compared, self.status.window_s = comparison.requests, comparison.window_s
        self.status.policies = comparison.policies
        self._write_status()
        told = [
            f"{name} {figures['mean_s']:.2f} {figures['p99_s']:.2f} {figures['longest_pause_s']:.2f}"
            for name, figures in comparison.policies.items()
        ]
        self._say(
            f"mean, p99 and longest pause in seconds of the last {comparison.requests} requests: {'; '.join(told)}"
        )

    def _write_status(self) -> None:
        if not self._closed:  # a comparison may end later
            self.status.write(self._file)

    def close(self) -> None:
        """The end: what was learned is kept."""
        self.learning.close()
        self._closed = True
        with suppress(OSError):
            self._file.unlink()


def _of_core(cost: Measured) -> CostProfile:
    return CostProfile(
        draft_s=cost.draft_s,
        verify_s=cost.verify_s,
        verify_slope_s=cost.verify_slope_s,
        prefill_token_s=cost.prefill_token_s,
        verify_token_s=cost.verify_token_s,
    )
