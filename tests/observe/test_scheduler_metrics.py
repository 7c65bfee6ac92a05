"""What Prometheus sees of a scheduler with scripted peers."""

from collections.abc import Callable
from typing import Any

import pytest

from protos.v1 import types_pb2 as types_pb
from scheduler_service import metrics
from scheduler_service.leader import Leader
from scheduler_service.metrics import Metrics
from tests.scheduler.live import Live, ScriptedGateway, ScriptedWorker, Switch, scheduler

Read = Callable[..., float | None]


def reader(leader: Leader) -> Read:
    registry = Metrics(lambda: leader).registry
    return lambda name, **labels: registry.get_sample_value(f"laps_sd_{name}", {"model_name": "scripted", **labels})


async def submitted(gateway: ScriptedGateway, *ids: str, **more: Any) -> None:
    for id in ids:
        await gateway.submit(id, **more)
    await gateway.until(lambda: gateway.accepted >= set(ids))


async def test_requests_are_counted_by_state_class_and_tenant(live: Live) -> None:
    leader, worker, gateway = live
    read = reader(leader)
    await submitted(gateway, "a", tenant="acme")
    await worker.until("a")
    await worker.report(worker.row("a", 0, 7))
    await gateway.until(lambda: gateway.tokens.get("a") == [7])
    await submitted(gateway, "b", tenant="acme", priority=types_pb.PRIORITY_BATCH)
    await submitted(gateway, "c", tenant="other people")
    assert [read(f"num_requests_{state}") for state in ("running", "waiting", "paused")] == [1, 2, 0]
    assert read("num_requests_waiting_by_class", **{"class": "batch"}) == 1
    assert [read("num_requests_running_by_class", **{"class": name}) for name in ("default", "batch")] == [1, 0]
    assert read("num_requests_waiting_by_class", **{"class": "interactive"}) == 0
    assert read("num_requests_waiting_by_tenant", tenant="acme") == 1
    assert (read("backlog_seconds", **{"class": "default"}) or 0) > 0
    assert read("requests_submitted_total") == 3
    assert read("scheduled_tokens_total") == 1
    assert read("reports_total") == 1


async def test_what_an_earlier_leader_left_is_counted_until_it_is_read(live: Live) -> None:
    leader, _, _ = live
    leader.recovery.unread = dict.fromkeys("ab")
    assert reader(leader)("unread_requests") == 2


async def test_a_preempted_request_is_paused_until_it_runs_again(store: Switch) -> None:
    async with scheduler(store, policy="srpt-length", predictor="none") as (leader, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        read = reader(leader)
        await submitted(gateway, "long", predicted_tokens=50)
        await worker.until("long")
        await worker.report(worker.row("long", 0, 7))
        await submitted(gateway, "short", predicted_tokens=1)
        while worker.command.schedule[0].request_id != "short":
            await worker.next_command()
        await worker.report(worker.row("short", 0, 7))
        await gateway.until(lambda: gateway.tokens.get("short") == [7])
        assert (read("num_requests_paused"), read("num_preemptions_total")) == (1, 1)
        assert read("num_requests_paused_by_class", **{"class": "default"}) == 1
        assert (read("longest_pause_seconds") or 0) > 0
        await gateway.close()
        await worker.close()


async def test_refusals_are_counted_by_reason(live: Live) -> None:
    leader, _, gateway = live
    await gateway.submit("late", timeout_s=1e-6)
    await gateway.submit("long", max_tokens=100_000)
    await gateway.until(lambda: gateway.refused.keys() >= {"late", "long"})
    read = reader(leader)
    assert read("admission_rejections_total", reason="deadline_passed") == 1
    assert read("admission_rejections_total", reason="bad_input") == 1


async def test_of_many_tenants_the_largest_are_named(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_TENANTS", 2)
    leader, _, gateway = live
    for number, tenant in enumerate(["a", "b", "b", "c", "c", "c", "d"]):
        await submitted(gateway, f"r{number}", tenant=tenant)
    read = reader(leader)
    assert [read("num_requests_waiting_by_tenant", tenant=name) for name in ("c", "b", "other")] == [3, 2, 2]
    assert read("num_requests_waiting_by_tenant", tenant="a") is None


async def test_writes_become_durable_after_a_lag_and_reports_are_answered(live: Live) -> None:
    leader, worker, gateway = live
    await submitted(gateway, "a")
    await worker.until("a")
    await worker.report(worker.row("a", 0, 7, finish=types_pb.FINISH_REASON_STOP))
    await gateway.until(lambda: "a" in gateway.endings)
    read = reader(leader)
    assert (read("commit_lag_seconds_count") or 0) >= 2
    assert read("request_queue_time_seconds_count") == 1
    assert read("request_predicted_over_true_length_count") == 1
    assert read("requests_ended_total", state="finished") == 1


async def test_a_scrape_looks_at_no_request(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be ten thousand, and all workers wait meanwhile."""
    leader, _, gateway = live
    await submitted(gateway, "a", "b")

    class Closed(dict[str, Any]):
        def _no(self, *_: object) -> Any:
            raise AssertionError("looked at requests")

        __iter__ = items = values = keys = __getitem__ = get = _no

    monkeypatch.setattr(leader.core.fleet, "entries", Closed(leader.core.fleet.entries))
    monkeypatch.setattr(leader.ledger, "live", Closed(leader.ledger.live))
    assert reader(leader)("num_requests_waiting") == 2
    monkeypatch.undo()


async def test_who_does_not_lead_says_so_and_nothing_else() -> None:
    registry = Metrics(lambda: None).registry
    assert registry.get_sample_value("laps_sd_leads") == 0
    assert registry.get_sample_value("laps_sd_num_requests_waiting") is None
