"""Workers of the live scheduler: who comes, is lost, is refused, talks nonsense."""

import asyncio
import math

import grpc
import pytest
from structlog.testing import capture_logs

from protos import version
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as gateway_pb
from protos.link.v1 import worker_link_pb2 as worker_pb
from protos.v1 import types_pb2 as types_pb
from scheduler_service.core.core import Core
from scheduler_service.core.policies import make_policy
from scheduler_service.event_log import replay
from scheduler_service.outbox import GatewayOutbox
from tests.scheduler.live import Live, ScriptedGateway, ScriptedWorker, Switch, drain, scheduler

STOP = types_pb.FINISH_REASON_STOP


async def test_a_burst_that_one_worker_lists_whole_reaches_the_idle_one_too(store: Switch) -> None:
    async with scheduler(store) as (leader, target):
        first, second = await ScriptedWorker(target, "first").attach(), await ScriptedWorker(target, "second").attach()
        for worker in (first, second):
            while worker.command.seq < leader.sessions[worker.name].seq or not worker.command.seq:
                await worker.next_command()
        for id in "ab":  # before anybody plans
            submit = gateway_pb.Submit(request_id=id, prompt=[1], limits=common_pb.Limits(max_tokens=9))
            await leader.requests.submit(submit, GatewayOutbox())
        await asyncio.gather(first.until("a"), second.until("b"))
        for peer in (first, second):
            await peer.close()


async def test_a_lost_workers_request_continues_on_another(store: Switch) -> None:
    async with scheduler(store) as (_, target):
        gateway, first = ScriptedGateway(target), await ScriptedWorker(target, "first").attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a")
        await first.until("a")
        await first.report(first.row("a", 0, 7, 8))
        await gateway.until(lambda: gateway.tokens.get("a") == [7, 8])
        second = await ScriptedWorker(target, "second").attach()
        await first.close()
        await second.until("a")
        assert second.admitted["a"].placement == 2
        assert list(second.admitted["a"].tokens) == [1, 2, 3, 7, 8]
        await second.report(second.row("a", 2, 9, finish=STOP))
        await gateway.until(lambda: "a" in gateway.endings)
        assert gateway.tokens["a"] == [7, 8, 9]
        await gateway.close()
        await second.close()


async def test_who_has_nothing_to_hear_hears_a_heartbeat(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gateways", "workers"):
        monkeypatch.setattr(f"scheduler_service.links.{module}.BEAT_S", 0.01)
    _, worker, gateway = live
    await gateway.submit("a")  # from here on they wait anew
    while await worker.read() != worker_pb.ToWorker():
        pass
    while await gateway.read() != gateway_pb.ToGateway():
        pass


async def test_a_silent_worker_is_lost(store: Switch) -> None:
    async with scheduler(store) as (leader, target):
        leader.settings = leader.settings.model_copy(update={"worker_timeout_s": 0.2})
        gateway = ScriptedGateway(target)
        await gateway.read()  # it is linked, and hears of whatever comes now
        worker = await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.until(lambda: not gateway.serving.ready)
        assert not leader.core.fleet.workers
        await gateway.close()
        await worker.close()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"protocol": 9}, "the worker speaks version 9, the scheduler versions 2 to 3: upgrade the scheduler"),
        ({"max_draft": 300}, "max_draft: must be at most 255"),
        ({"slots": 5000}, "slots: must be from 1 to 1024"),
        ({"model": {"fingerprint": "other"}}, "model: this scripted has other files"),
        ({"model": {"context_tokens": 255}}, "model: its context is smaller than the 256 tokens promised"),
        ({"model": {"refused": {"seed": "no"}}}, "model: its engine cannot serve seed, which the other workers do"),
        ({"held": [worker_pb.Held(placement=2**32 - 1)]}, "held: a placement must be at most 2147483648"),
        ({"cost": {"verify_s": math.nan}}, "cost: verify_s of nan s is no duration"),
        ({"cost": {"draft_s": 1e308}}, "cost: draft_s of 1e.308 s is no duration"),
        ({"cost": {"verify_s": 1e-9}}, "cost: verify_s must be at least 1e-06 s"),
    ],
)
async def test_a_worker_that_does_not_belong_here_is_refused(
    live: Live, change: dict[str, object], complaint: str
) -> None:
    _, worker, _ = live
    stranger = ScriptedWorker(worker.target, "stranger")
    with pytest.raises(grpc.aio.AioRpcError, match=complaint):
        await stranger.attach(**change)
    await stranger.close()


@pytest.mark.parametrize(
    "row",
    [
        {"drafted": 256},
        {"drafted": 1, "accepted": 2},
        {"prefilled": 2**32 - 1},
        {"finish": types_pb.FINISH_REASON_CANCELLED},
    ],
)
async def test_a_malformed_report_costs_its_worker_the_link_and_its_requests_nothing(
    live: Live, row: dict[str, int]
) -> None:
    _, first, gateway = live
    await gateway.submit("a")
    await first.until("a")
    await first.report(first.row("a", 0, 7, **row))
    with pytest.raises(grpc.aio.AioRpcError, match="rows: "):
        await drain(first)
    second = await ScriptedWorker(first.target, "second").attach()
    await second.until("a")
    await second.report(second.row("a", 0, 7, finish=STOP))
    await gateway.until(lambda: "a" in gateway.endings)
    assert gateway.tokens["a"] == [7]
    await second.close()


async def test_two_rows_of_one_request_are_refused_before_either_counts(live: Live) -> None:
    leader, worker, gateway = live
    await gateway.submit("a")
    await worker.until("a")
    await worker.report(worker.row("a", 0), worker.row("a", 0, 7))
    with pytest.raises(grpc.aio.AioRpcError, match="more than one"):
        await drain(worker)
    assert leader.core.fleet.entries["a"].emitted == 0


async def test_tokens_of_a_request_that_was_skipped_are_refused_unless_a_round_of_its_own_made_them(live: Live) -> None:
    leader, worker, gateway = live
    await gateway.submit("a")
    await worker.until("a")
    row = worker.row("a", 0, 7)
    row.skipped = worker_pb.SKIP_NO_BLOCKS
    await worker.report(row)
    with pytest.raises(grpc.aio.AioRpcError, match="tokens of no round"):
        await drain(worker)
    assert leader.core.fleet.entries["a"].emitted == 0


async def test_a_worker_without_a_model_does_not_decide_what_the_others_run(store: Switch) -> None:
    async with scheduler(store) as (_, target):
        empty = ScriptedWorker(target, "empty")
        hello = worker_pb.Hello(
            protocol=version.CURRENT, worker_id="empty", session="s", slots=1, block_tokens=16, blocks=64
        )
        await empty.call.write(worker_pb.FromWorker(hello=hello))
        with pytest.raises(grpc.aio.AioRpcError, match="model: must have a fingerprint"):
            await empty.read()
        good = await ScriptedWorker(target, "good").attach()
        assert good.welcome.epoch
        await good.close()
        await empty.close()


async def test_the_event_log_replays_to_the_same_plans(store: Switch, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    async with scheduler(store, event_log=path) as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        for id in "ab":
            await gateway.submit(id)
        await worker.until("a", "b")
        for start in range(12):
            await worker.report(worker.row("a", start, 7, drafted=4))
        await worker.until("b", "a")
        await worker.report(worker.row("b", 0, 9, finish=STOP))
        await gateway.until(lambda: "b" in gateway.endings)
        await gateway.close()
        await worker.close()
    async with scheduler(store, event_log=path) as (leader, target):  # a second life: its mean length is one token
        assert leader.core.fleet.known.length.predict(None, 50) == 1
        worker = await ScriptedWorker(target).attach()
        await worker.until("a")
        for start in range(12, 24):
            await worker.report(worker.row("a", start, 7, drafted=4))
            await worker.next_command()
        await worker.close()
    plans = list(replay(path, lambda: Core(make_policy("default"))))
    assert len(plans) > 3
    assert all(logged == rebuilt for _, logged, rebuilt in plans)


async def test_two_workers_of_one_name_are_told_of(store: Switch) -> None:
    """They take each other's place for as long as both run."""
    with capture_logs() as logs:
        async with scheduler(store) as (_, target):
            first = await ScriptedWorker(target, "w").attach()
            second = await ScriptedWorker(target, "w").attach()
            await first.ended()
            for peer in (first, second):
                await peer.close()
    assert [line["worker"] for line in logs if line["event"] == "worker_replaced"] == ["w"]
