"""Laws of the core that hold whatever happens in whatever order; hypothesis drives it."""

from collections import Counter
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler_service.core.core import Core
from scheduler_service.core.events import Cancelled, StepDone, Submitted, WorkerDown
from scheduler_service.core.lifecycle import State
from scheduler_service.core.load import Sum
from scheduler_service.core.placement import claimable
from scheduler_service.core.types import Effect, Ended, Plan, Record, RequestClass, WentOn
from tests.scheduler.builders import FakeWorker, core, request, worker_up
from tests.simulator.builders import NAMES

POLICIES = st.sampled_from(NAMES)
WORKERS = ("u", "v")
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 60)),
        st.tuples(st.just("step"), st.sampled_from(WORKERS)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("lose"), st.sampled_from(WORKERS)),
    ),
    max_size=120,
)


def reserved(core: Core) -> dict[RequestClass, Sum]:
    """What the live requests hold, counted anew."""
    sums = {klass: Sum() for klass in RequestClass}
    for entry in core.fleet.entries.values():
        one = sums[entry.request.klass]
        one.requests += 1
        one.tokens += entry.request.most_tokens
        one.prefill += entry.prefill_counted
        one.rounds += entry.rounds_counted
    return sums


class SimFleet:
    """Two workers of two slots under random events; each of them carries out what the core plans. Memory is short."""

    def __init__(self, policy: str, blocks: int = 12, host_blocks: int = 5) -> None:
        self.core: Core = core(policy)
        self.memory = {"blocks": blocks, "host_blocks": host_blocks}
        self.lengths: dict[str, int] = {}
        self.ended: list[str] = []
        self.written: dict[str, Record] = {}  # the last record that the store would have of each request
        self.plans: list[Plan] = []
        self.workers = {name: FakeWorker(self.core, self.lengths, name, slots=2, **self.memory) for name in WORKERS}
        self.now = 0.0

    def do(self, verb: str, what: object) -> None:
        self.now += 1
        effects: tuple[Effect, ...] = ()
        if verb == "submit":
            id = f"r{len(self.lengths)}"
            self.lengths[id] = int(what)  # type: ignore[call-overload]
            klass = RequestClass(1 + int(what) % 3)  # type: ignore[call-overload]
            effects = self.core.observe(Submitted(request(id, self.now, klass=klass)), self.now)
        elif verb == "step":
            worker = self.workers[str(what)]
            worker.now = self.now
            effects = worker.step(emit=3)
        elif verb == "cancel":
            effects = self.core.observe(Cancelled(f"r{what}"), self.now)
        elif verb == "lose":
            name = str(what)
            effects = self.core.observe(WorkerDown(name), self.now)
            self.workers[name] = FakeWorker(self.core, self.lengths, name, slots=2, **self.memory)
        self.ended += [effect.record.request.id for effect in effects if isinstance(effect, Ended)]
        self.check_records(effects)
        if verb == "step":  # only now: the plan may take KV away from those that went on
            self.plans.append(self.core.plan(str(what)))
        self.check()

    def check_records(self, effects: tuple[Effect, ...]) -> None:
        """Of a request that merely went on nothing has changed that is not told by its tokens."""
        for effect in effects:
            if isinstance(effect, WentOn):
                for id in effect.ids:
                    now, before = self.core.fleet.entries[id].record(), self.written[id]
                    told = {"emitted": now.emitted, "acceptance": now.acceptance, "key": now.key}
                    assert replace(before, **told) == now  # type: ignore[arg-type]
            else:
                self.written[effect.record.request.id] = effect.record

    def check(self) -> None:
        homes = [entry.home for entry in self.core.fleet.entries.values()]
        for name, worker in self.core.fleet.workers.items():
            assert len(worker.ranking) == homes.count(name)
            homed = [self.core.fleet.entries[key[-1]] for key in worker.ranking]
            assert sum(entry.offloaded for entry in homed) <= worker.up.host_blocks
            assert not any(entry.blocks and entry.offloaded for entry in homed)
        assert len(self.core.fleet.unplaced) == homes.count(None)
        assert self.core.fleet.load.by_class == reserved(self.core)
        self.check_counts()
        self.check_claims()

    def check_claims(self) -> None:
        """Where a search for a request of another worker begins is kept; one that begins anew finds the same."""
        fleet = self.core.fleet
        for name, worker in fleet.workers.items():
            batch = [fleet.entries[key[-1]] for key in worker.ranking.first(worker.up.slots)]
            found = claimable(fleet, name, batch)
            for donor in fleet.workers.values():
                donor.spare = (), None
            assert claimable(fleet, name, batch) is found

    def check_counts(self) -> None:
        """What is kept incrementally for those who watch is what a look at every request would find."""
        entries = list(self.core.fleet.entries.values())
        for state in (State.WAITING, State.RUNNING, State.PAUSED):
            counted = Counter(entry.request.klass for entry in entries if entry.state is state)
            assert +Counter(self.core.fleet.classes.in_state(state)) == counted
        waiting = Counter(entry.request.tenant for entry in entries if entry.state is State.WAITING)
        assert self.core.fleet.tenants.waiting() == waiting

    def drain(self) -> None:
        for _ in range(5000):
            if not self.core.fleet.entries:
                return
            for name in WORKERS:
                self.do("step", name)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(POLICIES, ACTIONS)
def test_every_request_ends_exactly_once(policy: str, actions: list[tuple[str, object]]) -> None:
    fleet = SimFleet(policy)
    for action in actions:
        fleet.do(*action)
    fleet.drain()
    assert sorted(fleet.ended) == sorted(fleet.lengths)
    assert all(one == Sum() for one in fleet.core.fleet.load.by_class.values())


@settings(max_examples=40, deadline=None)
@given(POLICIES, ACTIONS)
def test_equal_inputs_give_equal_plans(policy: str, actions: list[tuple[str, object]]) -> None:
    first, second = SimFleet(policy), SimFleet(policy)
    for action in actions:
        first.do(*action)
        second.do(*action)
    assert first.plans == second.plans


@settings(max_examples=40, deadline=None)
@given(POLICIES, ACTIONS)
def test_plans_settle_and_list_each_request_once_and_on_one_worker(
    policy: str, actions: list[tuple[str, object]]
) -> None:
    """A plan may move what another worker's last one listed, but not for ever."""
    fleet = SimFleet(policy)
    for action in actions:
        fleet.do(*action)
    passes = [[fleet.core.plan(name) for name in WORKERS] for _ in range(9)]  # claims are renewed by and by
    assert passes[-2] == passes[-1]
    listed = [run.id for plan in passes[-1] for run in plan.schedule]
    assert len(set(listed)) == len(listed)


@settings(max_examples=60, deadline=None)
@given(POLICIES, st.lists(st.integers(1, 40), min_size=3, max_size=12))
def test_no_slot_idles_while_a_request_waits(policy: str, lengths: list[int]) -> None:
    worker = FakeWorker(core(policy), {f"r{i}": length for i, length in enumerate(lengths)}, slots=2)
    worker.submit(*worker.lengths)
    while worker.core.fleet.entries:
        live = len(worker.core.fleet.entries)
        worker.step()
        assert len(worker.ran[-1]) == min(2, live)


@settings(max_examples=80, deadline=None)
@given(POLICIES, ACTIONS)
def test_no_slot_idles_while_a_request_waits_at_another_worker(policy: str, actions: list[tuple[str, object]]) -> None:
    """One that keeps its KV there may be right to wait; what has none may not. Memory is ample."""
    fleet = SimFleet(policy, blocks=1000)
    for action in actions:
        fleet.do(*action)
        for name, other in (WORKERS, WORKERS[::-1]):
            if len(fleet.core.plan(name).schedule) < 2:
                assert not len(fleet.core.fleet.unplaced)
                behind = list(fleet.core.fleet.workers[other].ranking)[2:]
                assert all(fleet.core.fleet.entries[key[-1]].blocks for key in behind)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 30))
def test_a_stale_report_never_changes_the_output(lengths: list[int], rounds: int) -> None:
    worker = FakeWorker(core(), {f"r{i}": length for i, length in enumerate(lengths)}, slots=2)
    worker.submit(*worker.lengths)
    for _ in range(rounds):
        plan = worker.core.plan("w")
        rows = [worker._row(run.id, run.placement, 1, 0) for run in plan.schedule[:2]]
        worker.core.observe(StepDone("w", tuple(rows), 100, 1.0), 1.0)
        before = {id: entry.emitted for id, entry in worker.core.fleet.entries.items()}
        worker.core.observe(StepDone("w", tuple(rows), 100, 1.0), 2.0)
        assert {id: entry.emitted for id, entry in worker.core.fleet.entries.items()} == before


def test_a_worker_that_comes_back_empty_changes_no_output() -> None:
    fleet = SimFleet("laps-sd")
    for _ in range(6):
        fleet.do("submit", 20)
    fleet.do("step", "u")
    fleet.core.observe(worker_up("u", slots=2), 9.0)
    assert all(entry.home != "u" for entry in fleet.core.fleet.entries.values())
