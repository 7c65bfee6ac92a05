"""Bounds on what is live, by class; the backlog; deadlines: who is refused, and that nobody is without need."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import grpc
import pytest

from protos.errors import QueueFull
from protos.v1 import inference_pb2
from scheduler_service.core import backlog
from scheduler_service.core.backlog import BACKLOG
from scheduler_service.core.events import Cancelled, Submitted
from scheduler_service.core.policies import make_policy
from scheduler_service.core.terms import Terms
from scheduler_service.core.types import Bounds, QueueIsFull, RequestClass, TooLarge, TooLate, Unseen
from scheduler_service.retries import MAX_AFTER_S, Retries
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.generate import Synthetic, generate
from scheduler_service.sim.results import percentile
from scheduler_service.sim.simulator import Simulation, Trace
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job
from scheduler_service.store import MemoryStore
from tests.scheduler.builders import FakeWorker, core, request
from tests.scheduler.live import ScriptedGateway, ScriptedWorker, scheduler
from tests.waiting import WAIT_S

INTERACTIVE, DEFAULT, BATCH = RequestClass
AUTO = Bounds(backlog_s=None)


class Queue(FakeWorker):
    """A worker of four slots, each round a second; requests of a class by number."""

    def __init__(self, bounds: Bounds, policy: str = "fcfs") -> None:
        super().__init__(core(policy, bounds=bounds), {}, slots=4)

    def fill(self, klass: RequestClass, most: int = 1000, **more: object) -> int:
        """How many get in until the first is refused."""
        for count in range(most):
            id = f"{klass.name}-{len(self.lengths)}"
            try:
                self.submit(id, klass=klass, **more)
            except QueueIsFull:
                return count
            self.lengths[id] = 10
        return most


def test_requests_are_bounded_and_worse_classes_first() -> None:
    queue = Queue(Bounds(requests=100))
    assert queue.fill(BATCH) == 50
    assert queue.fill(DEFAULT) == 30
    assert queue.fill(INTERACTIVE) == 10


def test_no_class_locks_another_out() -> None:
    queue = Queue(Bounds(requests=100))
    assert [queue.fill(klass) for klass in (INTERACTIVE, DEFAULT, BATCH)] == [90, 5, 5]
    assert len(queue.core.fleet.entries) == 100


def test_tokens_are_bounded_by_what_prompt_and_output_may_come_to() -> None:
    queue = Queue(Bounds(tokens=1000))
    assert queue.fill(DEFAULT, prompt=10, max_tokens=90) == 8
    assert queue.fill(DEFAULT, prompt=10, max_tokens=10) == 0
    assert queue.fill(INTERACTIVE, prompt=10, max_tokens=90) == 1


def test_what_ends_makes_room_for_as_much() -> None:
    queue = Queue(Bounds(requests=20))
    assert queue.fill(DEFAULT) == 16
    queue.run(11)
    assert queue.fill(DEFAULT) == 4


def test_what_an_earlier_leader_admitted_and_nobody_has_read_yet_takes_room() -> None:
    queue = Queue(Bounds(requests=20, tokens=100_000))
    queue.core.fleet.unseen = Unseen(10, 10 * 256)
    assert queue.fill(DEFAULT, max_tokens=100) == 6
    queue.core.fleet.unseen = Unseen(1, 99_990)
    assert queue.fill(DEFAULT, max_tokens=100) == 0
    queue.core.fleet.unseen = Unseen()
    assert queue.fill(DEFAULT, max_tokens=100) == 16 - 6


async def test_reservations_outlive_their_leader() -> None:
    store = MemoryStore()
    bounds = {"max_live": 3, "max_live_tokens": 300, "max_backlog_s": inf}
    async with scheduler(store, **bounds) as (leader, target):
        worker, gateway = await ScriptedWorker(target).attach(), ScriptedGateway(target)
        await gateway.until(lambda: gateway.serving.ready)
        for id in "ab":
            await gateway.submit(id, max_tokens=60)
        await gateway.until(lambda: gateway.accepted == {"a", "b"})
        before = leader.core.fleet.load.by_class
        await gateway.close()
        await worker.close()
    async with scheduler(store, **bounds) as (leader, target):
        worker, gateway = await ScriptedWorker(target).attach(), ScriptedGateway(target)
        await gateway.until(lambda: gateway.serving.ready)
        assert leader.core.fleet.load.by_class == before
        await gateway.submit("c", max_tokens=200)
        await gateway.submit("d", max_tokens=60)
        await gateway.submit("e", max_tokens=1)
        await gateway.until(lambda: gateway.accepted == {"d"} and set(gateway.refused) == {"c", "e"})
        assert "tokens" in gateway.refused["c"].message
        assert "requests" in gateway.refused["e"].message
        assert all(refusal.retry_after_s > 0 for refusal in gateway.refused.values())
        stats = await gateway.unary.Stats(inference_pb2.StatsRequest(), timeout=WAIT_S)
        assert (stats.refused, stats.priorities[1].requests, stats.priorities[1].tokens) == (2, 3, 3 * 63)
        assert [(one.waiting, one.tokens, one.refused) for one in stats.tenants] == [(3, 3 * 63, 2)]
        await gateway.close()
        await worker.close()


# ---- backlog ----


def test_a_tenants_flood_keeps_nobody_else_out() -> None:
    queue = Queue(AUTO)
    full = queue.fill(DEFAULT, tenant="flood")
    assert full == pytest.approx(BACKLOG + 4, abs=1)
    assert queue.fill(DEFAULT, tenant="second") == pytest.approx(full / 2, abs=1)
    assert queue.fill(DEFAULT, tenant="third") == pytest.approx(full / 3, abs=1)
    assert queue.fill(DEFAULT, tenant="flood") == 0


def test_a_tenants_part_of_the_backlog_goes_by_its_weight() -> None:
    queue = Queue(AUTO)
    queue.core.fleet.tenants.terms = {"heavy": Terms(weight=3)}
    full = queue.fill(DEFAULT, tenant="flood")
    assert queue.fill(DEFAULT, tenant="heavy") == pytest.approx(full * 3 / 4, abs=1)


def test_as_much_work_waits_as_so_many_mean_requests_bring() -> None:
    assert Queue(AUTO).fill(DEFAULT) == pytest.approx(BACKLOG + 4, abs=1)


def test_the_bound_follows_what_is_asked_for() -> None:
    """After hundreds of short requests long ones are admitted as if there had been no others."""
    queue = Queue(AUTO)
    for tokens, count in ((20, 500), (400, 200)):
        for number in range(count):
            id = f"{tokens}-{number}"
            queue.submit(id, predicted_tokens=tokens, max_tokens=2 * tokens)
            queue.core.observe(Cancelled(id), queue.now)
    assert queue.fill(DEFAULT, predicted_tokens=400, max_tokens=800) > 0.75 * BACKLOG


def test_work_is_bounded_in_seconds_too() -> None:
    queue = Queue(Bounds(backlog_s=100))
    admitted = queue.fill(DEFAULT, max_tokens=12)  # three tokens a round are believed: a second of four slots each
    assert admitted == 101


def test_a_flood_of_one_class_leaves_the_others_their_share_of_the_backlog() -> None:
    queue = Queue(AUTO)
    flood = queue.fill(INTERACTIVE)
    assert queue.fill(DEFAULT) == pytest.approx(0.2 * flood, abs=1)
    assert queue.fill(BATCH) == 1000


def test_a_batch_in_the_queue_refuses_nobody_of_a_better_class() -> None:
    queue = Queue(AUTO)
    queue.fill(BATCH)
    assert queue.fill(DEFAULT) == pytest.approx(BACKLOG + 4, abs=1)
    assert queue.fill(INTERACTIVE) == pytest.approx(BACKLOG + 4, abs=1)


def test_the_pace_is_measured() -> None:
    """A worker that takes twice as long as its costs say has twice the backlog, and the hint is twice as long."""
    told, measured = Queue(Bounds(backlog_s=1000)), Queue(Bounds(backlog_s=1000))
    for queue, slowness in ((told, 0.0), (measured, 1.0)):
        queue.fill(DEFAULT, 60, max_tokens=12)
        for id in queue.lengths:
            queue.lengths[id] = 10_000
        for _ in range(90):
            queue.now += slowness
            queue.step(drafted=0)
    waits = [backlog.waits_s(queue.core.fleet)[DEFAULT] for queue in (told, measured)]
    assert waits[1] == pytest.approx(2 * waits[0], rel=0.1)


def test_who_is_refused_is_told_when_there_is_room() -> None:
    queue = Queue(Bounds(backlog_s=10))
    queue.fill(DEFAULT, max_tokens=12)
    with pytest.raises(QueueIsFull) as refused:
        queue.submit("one more", max_tokens=12)
    assert 1 <= refused.value.room_s <= 3


def test_what_would_never_get_in_is_told_so() -> None:
    queue = Queue(Bounds(tokens=300))
    for klass, most in ((INTERACTIVE, 270), (DEFAULT, 240), (BATCH, 150)):
        queue.submit(f"{klass}", klass=klass, prompt=10, max_tokens=most - 10)
        queue.core.observe(Cancelled(f"{klass}"), queue.now)
        with pytest.raises(TooLarge, match=f"{most + 1} tokens, of at most {most}"):
            queue.submit(f"{klass} more", klass=klass, prompt=10, max_tokens=most - 9)


async def test_whom_only_its_own_bounds_keep_out_is_told_so_and_delays_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_service.requests.MAX_LINES", 1)
    (tmp_path / "tenants").write_text("a requests=1 tokens=500\nb requests=1\n")
    async with scheduler(MemoryStore(), tenants=tmp_path / "tenants") as (leader, target):
        worker, gateway = await ScriptedWorker(target).attach(), ScriptedGateway(target)
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("large", tenant="a", max_tokens=600)
        for number in range(50):
            await gateway.submit(f"{number}", tenant="a")
        await gateway.submit("b", tenant="b")
        await gateway.submit("b2", tenant="b")
        await gateway.until(lambda: len(gateway.refused) >= 51)
        assert gateway.refused["large"].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert not gateway.refused["large"].retry_after_s  # it would never get in
        assert {gateway.refused[f"{number}"].code for number in range(1, 50)} == {QueueFull.code.value[0]}
        first, last, other = [gateway.refused[id].retry_after_s for id in ("1", "49", "b2")]
        assert last > 10 * first  # they do not come back together
        assert other < 2 * first
        assert list(leader.requests._own_lines) == ["b"]
        assert leader.requests._retries.after_ms(leader.clock(), 2.0, 0.5) == 2000  # of others
        await worker.close()
        await gateway.close()


def test_those_who_are_refused_together_do_not_come_back_together() -> None:
    retries = Retries()
    first = [retries.after_ms(100.0, 2.0, 0.5) for _ in range(4)]
    assert first == [2000, 2500, 3000, 3500]
    assert retries.after_ms(101.0, 2.0, 0.5) == 3000  # two of the turns have passed
    assert retries.after_ms(1000.0, 2.0, 0.5) == 2000
    assert max(retries.after_ms(1000.0, 2.0, 0.5) for _ in range(1000)) == 1000 * MAX_AFTER_S


# ---- a flood, in virtual time ----

FLEET = SimFleet(slots=4, plan_lag=1, prefill_chunk=256, costs=StepCosts())


def jobs_at(load: float, count: int, seed: int = 1) -> list[Job]:
    what = Synthetic(requests=count, load=load, output_mean=20)
    return generate(what, seed, FLEET)


def after(first: Sequence[Job], then: Sequence[Job]) -> list[Job]:
    offset_s = first[-1].arrival_s
    moved = [replace(job, id=f"{len(first)}-{job.id}", arrival_s=job.arrival_s + offset_s) for job in then]
    return [*first, *moved]


def simulated(jobs: Sequence[Job], policy: str, bounds: Bounds) -> Trace:
    return Simulation(jobs, make_policy(policy), FLEET, bounds=bounds).run()


def p99_s(trace: Trace, jobs: Sequence[Job]) -> float:
    among = {job.id for job in jobs}
    return percentile(sorted(one.latency_s for one in trace.outcomes if one.job.id in among), 0.99)


@pytest.mark.parametrize("policy", ["fcfs", "gittins"])
def test_in_a_flood_who_is_admitted_waits_at_most_twice_as_long_as_in_a_busy_hour(policy: str) -> None:
    busy = jobs_at(0.9, 1000)
    flood = after(busy[:200], jobs_at(10, 5000, seed=2))
    normal, flooded = simulated(busy, policy, AUTO), simulated(flood, policy, AUTO)
    assert len(flooded.refused) > 0.8 * 5000
    assert p99_s(flooded, flood[200:]) < 2 * p99_s(normal, busy)


@pytest.mark.parametrize("policy", ["fcfs", "gittins"])
def test_one_tenants_flood_is_hardly_felt_by_another(policy: str) -> None:
    flood = [replace(job, tenant="flood") for job in jobs_at(10, 1500, seed=2)]
    quiet = [replace(job, id=f"quiet-{job.id}", tenant="quiet") for job in jobs_at(0.3, 200, seed=5)]
    quiet = [job for job in quiet if job.arrival_s < flood[-1].arrival_s]
    alone = simulated(quiet, policy, AUTO)
    beside = simulated(sorted([*flood, *quiet], key=lambda job: job.arrival_s), policy, AUTO)
    assert not any(job.tenant == "quiet" for job in beside.refused)
    assert p99_s(beside, quiet) < 2 * p99_s(alone, quiet)


def test_after_a_flood_all_is_as_before() -> None:
    flood, then = after(jobs_at(0.9, 100), jobs_at(10, 500, seed=2)), jobs_at(0.7, 500, seed=3)
    everything = after(flood, then)
    late = everything[-400:]  # the backlog of the flood is gone by then
    trace = simulated(everything, "fcfs", AUTO)
    assert not {job.id for job in trace.refused} & {job.id for job in late}
    assert p99_s(trace, late) == pytest.approx(p99_s(simulated(then, "fcfs", AUTO), then[-400:]), rel=0.1)


def test_at_normal_load_nobody_is_refused() -> None:
    assert not simulated(jobs_at(0.7, 800), "gittins", AUTO).refused


# ---- deadlines ----


def test_what_could_not_end_in_time_alone_is_refused_for_good() -> None:
    queue = Queue(Bounds())
    with pytest.raises(TooLate, match="cannot end within"):
        queue.submit("a", predicted_tokens=1000, deadline=20.0)
    queue.submit("b", predicted_tokens=10, deadline=20.0)


def test_what_could_not_end_in_time_behind_the_others_may_come_back() -> None:
    queue = Queue(Bounds())
    queue.fill(DEFAULT, 100, predicted_tokens=30)
    with pytest.raises(QueueIsFull, match="until its deadline") as refused:
        queue.submit("a", predicted_tokens=30, deadline=50.0)
    assert refused.value.room_s > 50
    queue.submit("urgent", klass=INTERACTIVE, predicted_tokens=30, deadline=50.0)


def test_an_unknown_length_is_no_reason_to_refuse() -> None:
    Queue(Bounds()).submit("a", deadline=3.0)


def test_what_waits_past_its_deadline_never_runs() -> None:
    queue = Queue(Bounds())
    queue.fill(DEFAULT, 4)
    queue.submit("a", deadline=3.5)
    queue.run(3)
    assert [ended.record.request.id for ended in queue.expire(4.0)] == ["a"]
    queue.run(20)
    assert not any("a" in ids for ids in queue.ran)


@pytest.mark.parametrize("policy", ["fcfs", "gittins", "laps-sd"])
def test_hardly_anybody_who_would_have_ended_in_time_is_refused(policy: str) -> None:
    """Everybody's deadline is a little after the end that it had without one."""
    jobs = jobs_at(0.8, 400)
    ends = {one.job.id: one.end_s for one in simulated(jobs, policy, AUTO).outcomes}

    class Hurried(Simulation):
        refusals = 0

        def _submit(self, job: Job, now: float) -> None:
            deadline = job.arrival_s + 1.25 * (ends[job.id] - job.arrival_s) + 0.05
            try:
                self.core.observe(Submitted(replace(job.request(self._max_tokens), deadline=deadline)), now)
            except (QueueIsFull, TooLate):
                self.refusals += 1
                self.core.observe(Submitted(job.request(self._max_tokens)), now)
            self._answer("w0", now)

    hurried = Hurried(jobs, make_policy(policy), FLEET)
    hurried.run()
    assert hurried.refusals <= 0.01 * len(jobs)


def test_a_core_without_bounds_refuses_nobody() -> None:
    queue = Queue(Bounds())
    assert queue.fill(DEFAULT, 500) == 500
    assert backlog.bound_s(queue.core.fleet) == inf
    assert request("x").most_tokens == 1004
