"""What follows a worker's costs as they change, and what stays nominal."""

from dataclasses import replace

from scheduler_service.core.events import CostChanged, Submitted
from scheduler_service.core.outlook import remaining_s, waits_s
from tests.scheduler.builders import COST, FakeWorker, core, records, request
from tests.simulator.builders import NAMES

SLOWER = replace(COST, verify_s=3.0, prefill_token_s=0.5)


def test_estimates_of_time_follow_the_costs() -> None:
    worker = FakeWorker(core("fcfs"), dict.fromkeys("abc", 10))
    worker.submit(*"abc", predicted_tokens=10)
    worker.step()
    before = [remaining_s(worker.core.fleet, id) for id in "ab"], waits_s(worker.core.fleet, ["c"])[0]
    worker.core.observe(CostChanged("w", replace(COST, verify_s=3.0)), 1.0)
    assert [remaining_s(worker.core.fleet, id) for id in "ab"] == [3 * seconds for seconds in before[0]]
    assert waits_s(worker.core.fleet, ["c"])[0] == 3 * before[1]


def test_chosen_draft_lengths_follow_the_costs() -> None:
    worker = FakeWorker(core("fcfs", draft_len=None), {"a": 100})
    worker.submit("a")
    worker.run(20, emit=5)
    (run,) = worker.core.plan("w").schedule
    assert run.draft_len > 0
    worker.core.observe(CostChanged("w", replace(COST, draft_s=2.0)), 20.0)
    (run,) = worker.core.plan("w").schedule
    assert run.draft_len == 0


def test_claims_and_attained_service_stay_nominal() -> None:
    """Else those ranked before the change and those after it would be compared in different seconds."""
    for policy in NAMES:
        changed, unchanged = (FakeWorker(core(policy), dict.fromkeys("abcd", 30), slots=2) for _ in range(2))
        for worker in (changed, unchanged):
            worker.submit("a", "b", "c")
            worker.run(8)
            if worker is changed:
                worker.core.observe(CostChanged("w", SLOWER), worker.now)
            worker.core.observe(Submitted(request("d", worker.now)), worker.now)
            worker.run(8)
        assert records(changed.core) == records(unchanged.core)
        assert changed.ran == unchanged.ran
