"""The live scheduler over real gRPC and a real Redis, with scripted workers and gateways."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
import redis.asyncio as aioredis

from protos.errors import UnknownRequest
from protos.v1 import gateway_link_pb2 as gateway_pb
from protos.v1 import inference_pb2 as inference_pb
from protos.v1 import types_pb2 as types_pb
from protos.v1 import worker_link_pb2 as worker_pb
from scheduler_service.config import Settings
from scheduler_service.core.core import Core
from scheduler_service.core.entry import Entry
from scheduler_service.core.policies import make_policy
from scheduler_service.event_log import replay
from scheduler_service.gateways import GatewayOutbox
from scheduler_service.leader import Leader
from scheduler_service.ledger import Ledger, Tracked
from scheduler_service.store import MemoryStore, RedisStore, Stored, StoreUnavailable, Verdict, Write
from scheduler_service.store.rounds import decode
from tests.scheduler.builders import request
from tests.scheduler.live import WAIT_S, ScriptedGateway, ScriptedWorker, scheduler
from tests.waiting import until

STOP = types_pb.FINISH_REASON_STOP


class Switch(RedisStore):
    """A store whose connection can be cut."""

    cut = False

    async def commit(self, epoch: int, number: int, writes: Sequence[Write]) -> list[Verdict]:
        if self.cut:
            raise StoreUnavailable("cut")
        return await super().commit(epoch, number, writes)


@pytest.fixture
async def store(redis_url: str, namespace: str) -> AsyncIterator[Switch]:
    made = Switch(redis_url, namespace=namespace)
    yield made
    await made.close()


@pytest.fixture
async def live(store: Switch) -> AsyncIterator[tuple[Leader, ScriptedWorker, ScriptedGateway]]:
    async with scheduler(store, policy="fcfs", max_pending_steps=2) as (leader, target):
        gateway = ScriptedGateway(target)
        worker = await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        yield leader, worker, gateway
        await gateway.close()
        await worker.close()


Live = tuple[Leader, ScriptedWorker, ScriptedGateway]


async def drain(worker: ScriptedWorker) -> None:
    while True:
        await worker.next_command()


async def test_a_request_is_in_redis_before_it_is_acknowledged(live: Live, store: Switch) -> None:
    _, _, gateway = live
    await gateway.submit("a")
    await gateway.until(lambda: "a" in gateway.accepted)
    stored = await store.get("a")
    assert stored is not None
    assert stored.record.request.prompt_tokens == 3


async def test_tokens_reach_the_gateway_only_when_they_are_durable(live: Live, store: Switch) -> None:
    _, worker, gateway = live
    await gateway.submit("a")
    await gateway.until(lambda: "a" in gateway.accepted)
    await worker.until("a")
    store.cut = True
    await worker.report(worker.row("a", 0, 7, 8))
    await worker.next_command()  # planned without waiting for Redis
    assert "a" not in gateway.tokens
    store.cut = False
    await gateway.until(lambda: gateway.tokens.get("a") == [7, 8])
    assert (await store.get("a")).record.emitted == 2  # type: ignore[union-attr]


async def test_planning_stops_at_the_bound_while_redis_is_down(live: Live, store: Switch) -> None:
    leader, worker, gateway = live
    await gateway.submit("a")
    await gateway.until(lambda: "a" in gateway.accepted)
    await worker.until("a")
    store.cut = True
    for start in range(3):
        await worker.report(worker.row("a", start, 7))

    async def full() -> bool:
        return leader.persister.full

    await until(full)  # commands for several reports may come as one: their number says nothing
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(drain(worker), 0.05)
    store.cut = False
    await gateway.until(lambda: gateway.tokens.get("a") == [7, 7, 7])


async def test_a_burst_of_submissions_is_admitted_whole(live: Live) -> None:
    """More of them than reports may be on their way to the store."""
    _, _, gateway = live
    ids = {f"r{number}" for number in range(40)}
    for id in ids:
        await gateway.submit(id)
    await gateway.until(lambda: gateway.accepted | set(gateway.refused) == ids)
    assert not gateway.refused


async def test_a_payload_is_sent_once(live: Live) -> None:
    _, worker, gateway = live
    await gateway.submit("a", 5, 6)
    await worker.until("a")
    assert list(worker.command.admit[0].tokens) == [5, 6]
    await worker.report(worker.row("a", 0, 7))
    command = await worker.next_command()
    assert [run.request_id for run in command.rank] == ["a"]
    assert not command.admit


async def test_a_finished_request_is_told_forgotten_and_kept_for_questions(live: Live) -> None:
    _, worker, gateway = live
    await gateway.submit("a")
    await worker.until("a")
    await worker.report(worker.row("a", 0, 7, 2, finish=STOP))
    await gateway.until(lambda: "a" in gateway.endings)
    assert gateway.endings["a"].finish_reason == STOP
    assert gateway.tokens["a"] == [7, 2]
    assert list((await worker.until()).forget) == ["a"]
    status = await gateway.unary.GetRequest(inference_pb.GetRequestRequest(request_id="a"), timeout=WAIT_S)
    assert (status.state, status.output_tokens, status.finish_reason) == ("finished", 2, STOP)


async def test_cancel_ends_at_once_and_the_worker_forgets(live: Live) -> None:
    _, worker, gateway = live
    await gateway.submit("a")
    await worker.until("a")
    await gateway.cancel("a")
    await gateway.until(lambda: "a" in gateway.endings)
    assert gateway.endings["a"].finish_reason == types_pb.FINISH_REASON_CANCELLED
    assert list((await worker.until()).forget) == ["a"]


async def test_a_deadline_ends_a_request(live: Live) -> None:
    _, _, gateway = live
    await gateway.submit("a", deadline_unix_ms=round(time.time() * 1000) + 200)
    await gateway.until(lambda: "a" in gateway.endings)
    assert gateway.endings["a"].finish_reason == types_pb.FINISH_REASON_DEADLINE


async def test_why_am_i_waiting_is_answered(live: Live) -> None:
    _, worker, gateway = live
    await gateway.submit("a")
    await gateway.submit("b")
    await worker.until("a", "b")
    await worker.report(worker.row("a", 0, 7))
    await gateway.until(lambda: gateway.tokens.get("a") == [7])
    status = await gateway.unary.GetRequest(inference_pb.GetRequestRequest(request_id="b"), timeout=WAIT_S)
    assert (status.state, status.position, status.queue_level) == ("waiting", 1, 1)
    assert status.estimated_end > status.estimated_start > status.submitted_at


async def test_an_unknown_request_is_not_found(live: Live) -> None:
    _, _, gateway = live
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway.unary.GetRequest(inference_pb.GetRequestRequest(request_id="x"), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_second_gateway_follows_from_an_offset(live: Live) -> None:
    _, worker, gateway = live
    await gateway.submit("a")
    await worker.until("a")
    await worker.report(worker.row("a", 0, 7))
    await worker.report(worker.row("a", 1, 8, 9))
    await gateway.until(lambda: gateway.tokens.get("a") == [7, 8, 9])
    second = ScriptedGateway(gateway.target)
    second.tokens["a"] = [7]
    await second.follow("a", 1)
    await second.until(lambda: second.tokens["a"] == [7, 8, 9])
    await second.close()


async def test_a_resubmission_is_accepted_once_more_and_runs_once(live: Live) -> None:
    leader, _, gateway = live
    await gateway.submit("a", deadline_unix_ms=10**15)
    await gateway.until(lambda: "a" in gateway.accepted)
    gateway.accepted.clear()
    await gateway.submit("a", deadline_unix_ms=10**15 + 1)  # each attempt has its own
    await gateway.until(lambda: "a" in gateway.accepted)
    assert len(leader.core.entries) == 1


async def test_a_resubmission_of_an_ended_request_gets_its_answer(live: Live) -> None:
    _, worker, gateway = live
    await gateway.submit("a", deadline_unix_ms=10**15)
    await worker.until("a")
    await worker.report(worker.row("a", 0, 7, 8, finish=STOP))
    await gateway.until(lambda: "a" in gateway.endings)
    again = ScriptedGateway(gateway.target)
    await again.submit("a", deadline_unix_ms=10**15 + 1)
    await again.until(lambda: "a" in again.endings or "a" in again.refused)
    assert again.tokens["a"] == [7, 8]
    await again.close()


async def test_another_submission_under_the_id_of_an_ended_request_is_refused(live: Live) -> None:
    _, worker, gateway = live
    await gateway.submit("a")
    await worker.until("a")
    await worker.report(worker.row("a", 0, 7, finish=STOP))
    await gateway.until(lambda: "a" in gateway.endings)
    await gateway.submit("a", 9, 9)
    await gateway.until(lambda: "a" in gateway.refused)
    assert gateway.refused["a"].code == grpc.StatusCode.ALREADY_EXISTS.value[0]


async def test_what_is_not_durable_is_not_yet_the_submission_of_its_id() -> None:
    """It may turn out that an ended request of other content has it. (Simulated faults, seed 17222.)"""
    ledger = Ledger(MemoryStore(), time.time, lambda id: None)
    ledger.live["a"] = Tracked(gateway_pb.Submit(request_id="a"), Entry(request("a")).record())
    with pytest.raises(UnknownRequest):
        await ledger.submission("a")
    ledger.live["a"].stored = True
    assert (await ledger.submission("a")).request_id == "a"


async def test_a_submission_can_be_asked_for_while_it_lives_and_after(live: Live) -> None:
    _, worker, gateway = live

    async def prompt() -> list[int]:
        submit = await gateway.unary.GetSubmission(inference_pb.GetRequestRequest(request_id="a"), timeout=WAIT_S)
        return list(submit.prompt)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await prompt()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    await gateway.submit("a", 5, 6)
    await gateway.until(lambda: "a" in gateway.accepted)
    assert await prompt() == [5, 6]
    await worker.until("a")
    await worker.report(worker.row("a", 0, 7, finish=STOP))
    await gateway.until(lambda: "a" in gateway.endings)
    assert await prompt() == [5, 6]


async def test_a_request_that_vanished_from_redis_is_written_again(live: Live, store: Switch, redis_url: str) -> None:
    _, worker, gateway = live
    await gateway.submit("a")
    await worker.until("a")
    await worker.report(worker.row("a", 0, 7, 8))
    await gateway.until(lambda: gateway.tokens.get("a") == [7, 8])
    async with aioredis.Redis.from_url(redis_url) as client:
        await client.delete(store.keys.request("a"), store.keys.log("a"))
    await worker.report(worker.row("a", 2, 9))
    await gateway.until(lambda: gateway.tokens["a"] == [7, 8, 9])
    stored = await store.get("a")
    assert stored is not None
    assert [token for round in decode(stored.log) for token in round.tokens] == [7, 8, 9]


async def test_another_request_under_a_live_id_is_refused(live: Live) -> None:
    _, _, gateway = live
    await gateway.submit("a", 1)
    await gateway.submit("a", 2)
    await gateway.until(lambda: "a" in gateway.refused)
    assert gateway.refused["a"].code == grpc.StatusCode.ALREADY_EXISTS.value[0]


async def test_what_exceeds_the_context_is_refused(live: Live) -> None:
    _, _, gateway = live
    await gateway.submit("a", *range(1, 10), max_tokens=250)
    await gateway.until(lambda: "a" in gateway.refused)
    assert gateway.refused["a"].message == "max_tokens: prompt and output are 259 tokens, the context holds 256"


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"max_tokens": 0}, "max_tokens: must not be empty"),
        ({"class": 9}, "class: 9 is none of the classes"),
        ({"sampling": types_pb.Sampling(temperature=math.nan)}, "temperature: must be a number from 0"),
        (
            {"sampling": types_pb.Sampling(presence_penalty=math.nan)},
            "sampling: penalties and bias must be at most 100",
        ),
        (
            {"sampling": types_pb.Sampling(logit_bias=[types_pb.LogitBias(bias=1e9)])},
            "sampling: penalties and bias must be at most 100",
        ),
        ({"sampling": types_pb.Sampling(logprobs=2**31)}, "logprobs: 2147483648 alternatives; at most 20"),
        ({"sampling": types_pb.Sampling(top_p=-1)}, "top_p: must be from 0 to 1"),
    ],
)
async def test_a_malformed_submission_is_refused_and_the_link_stays(
    live: Live, more: dict[str, Any], complaint: str
) -> None:
    _, _, gateway = live
    await gateway.submit("bad", **more)
    await gateway.submit("good")
    await gateway.until(lambda: "good" in gateway.accepted)
    assert gateway.refused["bad"].message == complaint


@pytest.mark.parametrize("id", ["", "x" * 129, "no header\n"])
async def test_an_id_that_is_no_key_is_refused(live: Live, id: str) -> None:
    _, _, gateway = live
    await gateway.submit(id)
    await gateway.until(lambda: id in gateway.refused)
    assert gateway.refused[id].message == "request_id: must have 1 to 128 characters: letters, digits and . _ : -"


async def test_without_a_worker_nothing_is_admitted(store: Switch) -> None:
    async with scheduler(store) as (_, target):
        gateway = ScriptedGateway(target)
        await gateway.submit("a")
        await gateway.until(lambda: "a" in gateway.refused)
        assert gateway.refused["a"].code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert gateway.refused["a"].retry_after_ms > 0
        await gateway.close()


async def test_a_full_queue_refuses_with_a_hint(store: Switch) -> None:
    async with scheduler(store, max_live=1) as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a")
        await gateway.submit("b")
        await gateway.until(lambda: "b" in gateway.refused)
        assert gateway.refused["b"].code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert gateway.refused["b"].retry_after_ms > 0
        await gateway.close()
        await worker.close()


async def test_a_restarted_scheduler_reads_redis_back_and_goes_on(redis_url: str, namespace: str) -> None:
    store = RedisStore(redis_url, namespace=namespace)
    async with scheduler(store) as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a")
        await worker.until("a")
        await worker.report(worker.row("a", 0, 7, 8))
        await gateway.until(lambda: gateway.tokens.get("a") == [7, 8])
        await worker.report(worker.row("a", 2, 9, 9, 9))
        await gateway.close()
        await worker.close()
    first_epoch = worker.welcome.epoch
    stored = await store.get("a")
    assert stored is not None
    async with scheduler(store) as (_, target):
        worker = await ScriptedWorker(target).attach(worker_pb.Held(request_id="a", placement=1, output_tokens=5))
        assert worker.welcome.epoch > first_epoch
        gateway = ScriptedGateway(target)
        gateway.tokens["a"] = [7, 8]
        await gateway.follow("a", 2)
        await worker.until("a")
        assert list(worker.command.admit[0].tokens)[:5] == [1, 2, 3, 7, 8]
        assert worker.command.admit[0].placement == 1
        await worker.report(worker.row("a", stored.record.emitted, 4, finish=STOP))
        await gateway.until(lambda: "a" in gateway.endings)
        assert gateway.tokens["a"][-1] == 4
        await gateway.close()
        await worker.close()
    await store.close()


async def test_a_finished_request_can_be_followed_after_a_restart(redis_url: str, namespace: str) -> None:
    store = RedisStore(redis_url, namespace=namespace)
    async with scheduler(store) as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a")
        await worker.until("a")
        await worker.report(worker.row("a", 0, 7, 8, finish=STOP))
        await gateway.until(lambda: "a" in gateway.endings)
        await gateway.close()
        await worker.close()
    async with scheduler(store) as (_, target):
        gateway = ScriptedGateway(target)
        await gateway.follow("a")
        await gateway.until(lambda: "a" in gateway.endings)
        assert gateway.tokens["a"] == [7, 8]
        await gateway.close()
    await store.close()


async def test_waiting_requests_are_read_while_the_new_leader_serves(redis_url: str, namespace: str) -> None:
    """Who follows one that is still to be read is answered in its turn, and holds up nobody."""

    class Gated(RedisStore):
        opened = asyncio.Event()

        async def read(self, ids: Sequence[str]) -> list[Stored | None]:
            if "waits" in ids:
                await self.opened.wait()
            return await super().read(ids)

    store = Gated(redis_url, namespace=namespace)
    async with scheduler(store, policy="fcfs") as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        for id in ("runs", "waits"):
            await gateway.submit(id)
        await worker.until("runs", "waits")
        await worker.report(worker.row("runs", 0, 7))
        await gateway.until(lambda: gateway.tokens.get("runs") == [7])
    await gateway.close()
    await worker.close()
    async with scheduler(store, policy="fcfs") as (leader, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        for id in ("waits", "runs", "nobody"):
            await gateway.follow(id)
        await gateway.until(lambda: gateway.tokens.get("runs") == [7] and "nobody" in gateway.refused)
        assert "waits" not in gateway.accepted
        store.opened.set()
        await gateway.until(lambda: "waits" in gateway.accepted)
        await worker.until("runs", "waits")
        assert not leader.recall.unread
        await gateway.close()
        await worker.close()
    await store.close()


async def test_a_take_over_that_redis_breaks_off_is_repeated_whole(redis_url: str, namespace: str) -> None:
    class BreaksOff(RedisStore):
        broken = False

        async def read(self, ids: Sequence[str]) -> list[Stored | None]:
            if ids and not self.broken:
                self.broken = True
                raise StoreUnavailable("broken off")
            return await super().read(ids)

    store = BreaksOff(redis_url, namespace=namespace)
    async with scheduler(store) as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a")
        await worker.until("a")
        await worker.report(worker.row("a", 0, 7))
        await gateway.until(lambda: gateway.tokens.get("a") == [7])
        await gateway.close()
        await worker.close()
    leader = Leader(Settings(_cli_parse_args=False), store)  # type: ignore[call-arg]
    with pytest.raises(StoreUnavailable):
        await leader.lead()
    assert not leader.core.entries
    await leader.lead()
    assert list(leader.core.entries) == ["a"]
    await store.close()


async def test_a_burst_that_one_worker_lists_whole_reaches_the_idle_one_too(store: Switch) -> None:
    async with scheduler(store) as (leader, target):
        first, second = await ScriptedWorker(target, "first").attach(), await ScriptedWorker(target, "second").attach()
        for worker in (first, second):
            while worker.command.seq < leader.sessions[worker.name].seq or not worker.command.seq:
                await worker.next_command()
        for id in "ab":  # before anybody plans
            submit = gateway_pb.Submit(request_id=id, prompt=[1], limits=types_pb.Limits(max_tokens=9))
            await leader.submit(submit, GatewayOutbox())
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
        monkeypatch.setattr(f"scheduler_service.{module}.BEAT_S", 0.01)
    _, worker, gateway = live
    await gateway.submit("a")  # from here on they wait anew
    while await worker.read() != worker_pb.ToWorker():
        pass
    while await gateway.read() != gateway_pb.ToGateway():
        pass


async def test_a_silent_worker_is_lost(store: Switch) -> None:
    async with scheduler(store, worker_timeout_s=0.2) as (leader, target):
        worker = await ScriptedWorker(target).attach()
        gateway = ScriptedGateway(target)
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.until(lambda: not gateway.serving.ready)
        assert not leader.core.workers
        await gateway.close()
        await worker.close()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"protocol": 9}, "protocol: the worker speaks version 9, the scheduler version 1"),
        ({"max_draft": 300}, "max_draft: must be at most 255"),
        ({"slots": 5000}, "slots: must be from 1 to 1024"),
        ({"model": {"fingerprint": "other"}}, "model: scripted differs"),
        ({"model": {"context_tokens": 255}}, "model: its context is smaller than the 256 tokens promised"),
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
    [{"drafted": 256}, {"drafted": 1, "accepted": 2}, {"finish": types_pb.FINISH_REASON_CANCELLED}],
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
    assert leader.core.entries["a"].emitted == 0


async def test_a_worker_without_a_model_does_not_decide_what_the_others_run(store: Switch) -> None:
    async with scheduler(store) as (_, target):
        empty = ScriptedWorker(target, "empty")
        hello = worker_pb.Hello(protocol=1, worker_id="empty", session="s", slots=1, block_tokens=16, blocks=64)
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
        assert leader.core.length.predict(None, 50) == 1
        worker = await ScriptedWorker(target).attach()
        await worker.until("a")
        for start in range(12, 24):
            await worker.report(worker.row("a", start, 7, drafted=4))
            await worker.next_command()
        await worker.close()
    plans = list(replay(path, lambda: Core(make_policy("default"))))
    assert len(plans) > 3
    assert all(logged == rebuilt for _, logged, rebuilt in plans)
