"""Requests and their streams at the live scheduler: real gRPC, a real Redis, scripted workers and gateways."""

import math
from typing import Any

import grpc
import pytest
import redis.asyncio as aioredis

from protos.errors import UnknownRequest
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as gateway_pb
from protos.times import seconds
from protos.v1 import inference_pb2 as inference_pb
from protos.v1 import status_pb2 as status_pb
from protos.v1 import types_pb2 as types_pb
from scheduler_service.core.entry import Entry
from scheduler_service.core.known import Known
from scheduler_service.ledger import Ledger
from scheduler_service.store import MemoryStore
from scheduler_service.store.rounds import decode
from scheduler_service.tracked import Tracked
from tests.scheduler.builders import request
from tests.scheduler.live import WAIT_S, Live, ScriptedGateway, ScriptedWorker, Switch, scheduler
from tests.waiting import until

STOP = types_pb.FINISH_REASON_STOP


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
    await gateway.heard_all()
    assert "a" not in gateway.tokens
    store.cut = False
    await gateway.until(lambda: gateway.tokens.get("a") == [7, 8])
    assert (await store.get("a")).record.emitted == 2  # type: ignore[union-attr]


async def test_planning_stops_at_the_bound_while_redis_is_down(live: Live, store: Switch) -> None:
    leader, worker, gateway = live
    session = leader.sessions[worker.name]
    await gateway.submit("a")
    await gateway.until(lambda: "a" in gateway.accepted)
    await worker.until("a")
    store.cut = True

    async def all_taken() -> bool:
        return session.seen_step == worker.step_no

    for start in range(2):
        await worker.report(worker.row("a", start, 7))
    await until(all_taken)
    await worker.report(worker.row("a", 2, 7))
    await until(all_taken)
    await gateway.heard_all()  # meanwhile a command that waits for nothing would be made
    assert session.command.seen_step < worker.step_no
    store.cut = False
    await gateway.until(lambda: gateway.tokens.get("a") == [7, 7, 7])
    while worker.command.seen_step < worker.step_no:
        await worker.next_command()


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
    assert [run.request_id for run in command.schedule] == ["a"]
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
    answer = await gateway.unary.GetRequest(inference_pb.GetRequestRequest(request_id="a"), timeout=WAIT_S)
    status = answer.request
    assert (status.state, status.output_tokens, status.finish_reason) == (status_pb.REQUEST_STATE_FINISHED, 2, STOP)


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
    await gateway.submit("a", timeout_s=0.2)
    await gateway.until(lambda: "a" in gateway.endings)
    assert gateway.endings["a"].finish_reason == types_pb.FINISH_REASON_DEADLINE
    known = await gateway.unary.GetRequest(inference_pb.GetRequestRequest(request_id="a"), timeout=WAIT_S)
    waited_s = gateway.endings["a"].queue_ms / 1000
    told_s = seconds(known.request.queue_time)  # in whole microseconds; the ending has a float of milliseconds
    assert told_s == pytest.approx(waited_s, abs=1e-5), "though it never ran, it waits no longer"


async def test_why_am_i_waiting_is_answered(live: Live) -> None:
    _, worker, gateway = live
    await gateway.submit("a")
    await gateway.submit("b")
    await worker.until("a", "b")
    await worker.report(worker.row("a", 0, 7))
    await gateway.until(lambda: gateway.tokens.get("a") == [7])
    answer = await gateway.unary.GetRequest(inference_pb.GetRequestRequest(request_id="b"), timeout=WAIT_S)
    status = answer.request
    assert (status.state, status.position, status.queue_level) == (status_pb.REQUEST_STATE_WAITING, 1, 1)
    assert seconds(status.estimated_end_time) > seconds(status.estimated_start_time) > seconds(status.submit_time)


async def test_the_list_tells_the_last_rounds_of_each_request_and_why_others_wait(live: Live) -> None:
    _, worker, gateway = live
    await gateway.submit("a")
    await gateway.submit("b")
    await worker.until("a", "b")
    await worker.report(worker.row("a", 0, 7, 8, 9, drafted=4, accepted=2))
    await worker.report(worker.row("a", 3, 7, drafted=3, accepted=0))
    await gateway.until(lambda: gateway.tokens.get("a") == [7, 8, 9, 7])
    listed = await gateway.unary.ListRequests(inference_pb.ListRequestsRequest(recent_rounds=8), timeout=WAIT_S)
    first, second = listed.requests
    assert [(one.tokens, one.drafted, one.accepted) for one in first.recent_rounds] == [(3, 4, 2), (1, 3, 0)]
    assert first.priority == types_pb.PRIORITY_DEFAULT
    assert first.wait_reason == status_pb.WAIT_REASON_UNSPECIFIED
    assert second.wait_reason != status_pb.WAIT_REASON_UNSPECIFIED
    assert not second.recent_rounds


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
    await gateway.submit("a", timeout_s=1e6)
    await gateway.until(lambda: "a" in gateway.accepted)
    gateway.accepted.clear()
    await gateway.submit("a", timeout_s=1e6 + 1)  # each attempt has its own
    await gateway.until(lambda: "a" in gateway.accepted)
    assert len(leader.core.fleet.entries) == 1


async def test_only_a_submission_is_acknowledged(live: Live) -> None:
    """Whoever submits under an id must not take what is said of another's, followed by the same gateway, for it."""
    _, worker, gateway = live
    await gateway.submit("a")
    await worker.until("a")
    await worker.report(worker.row("a", 0, 7))
    await gateway.until(lambda: gateway.tokens.get("a") == [7])
    again = ScriptedGateway(gateway.target)
    await again.follow("a")
    await again.until(lambda: again.tokens.get("a") == [7])
    await worker.report(worker.row("a", 1, 8, finish=STOP))
    await again.until(lambda: "a" in again.endings)
    await gateway.until(lambda: "a" in gateway.endings)
    await again.close()
    late = ScriptedGateway(gateway.target)
    await late.follow("a")
    await late.until(lambda: late.tokens.get("a") == [7, 8])
    await late.close()
    assert not again.accepted | late.accepted


async def test_a_resubmission_of_an_ended_request_gets_its_answer(live: Live) -> None:
    _, worker, gateway = live
    await gateway.submit("a", timeout_s=1e6)
    await worker.until("a")
    await worker.report(worker.row("a", 0, 7, 8, finish=STOP))
    await gateway.until(lambda: "a" in gateway.endings)
    again = ScriptedGateway(gateway.target)
    await again.submit("a", timeout_s=1e6 + 1)
    await again.until(lambda: "a" in again.endings or "a" in again.refused)
    assert again.tokens["a"] == [7, 8]
    await again.close()


async def test_another_submission_under_the_id_of_an_ended_request_is_refused(live: Live) -> None:
    leader, worker, gateway = live
    await gateway.submit("a")
    await worker.until("a")
    await worker.report(worker.row("a", 0, 7, finish=STOP))
    await gateway.until(lambda: "a" in gateway.endings)
    await gateway.submit("a", 9, 9)
    await gateway.until(lambda: "a" in gateway.refused)
    assert gateway.refused["a"].code == grpc.StatusCode.ALREADY_EXISTS.value[0]
    assert (leader.counters.submitted, leader.counters.repeated) == (2, 1)


async def test_what_is_not_durable_is_not_yet_the_submission_of_its_id() -> None:
    """It may turn out that an ended request of other content has it. (Simulated faults, seed 17222.)"""
    ledger = Ledger(MemoryStore(), lambda id: None)
    ledger.live["a"] = Tracked(gateway_pb.Submit(request_id="a"), Entry(request("a"), Known(4)).record())
    with pytest.raises(UnknownRequest):
        await ledger.submission("a")
    ledger.live["a"].stored = True
    assert (await ledger.submission("a")).request_id == "a"


async def test_a_submission_can_be_asked_for_while_it_lives_and_after(live: Live) -> None:
    _, worker, gateway = live

    async def prompt() -> list[int]:
        submit = await gateway.unary.GetSubmission(gateway_pb.GetSubmissionRequest(request_id="a"), timeout=WAIT_S)
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
        ({"priority": 9}, "priority: 9 is none of the priorities"),
        ({"timeout_s": math.nan}, "timeout_s: must be from 0 to 1e+09"),
        ({"sampling": common_pb.Sampling(temperature=math.nan)}, "temperature: must be a number from 0"),
        (
            {"sampling": common_pb.Sampling(presence_penalty=math.nan)},
            "sampling: penalties and bias must be at most 100",
        ),
        (
            {"sampling": common_pb.Sampling(logit_bias=[common_pb.LogitBias(bias=1e9)])},
            "sampling: penalties and bias must be at most 100",
        ),
        ({"sampling": common_pb.Sampling(logprobs=2**31)}, "logprobs: 2147483648 alternatives; at most 20"),
        (
            {"sampling": common_pb.Sampling(prompt_logprobs=21), "max_tokens": 0},
            "prompt_logprobs: 21 alternatives; at most 20",
        ),
        ({"sampling": common_pb.Sampling(top_p=-1)}, "top_p: must be from 0 to 1"),
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
        assert gateway.refused["a"].retry_after_s > 0
        await gateway.close()


async def test_a_full_queue_refuses_with_a_hint(store: Switch) -> None:
    async with scheduler(store, max_live=1) as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a")
        await gateway.submit("b")
        await gateway.until(lambda: "b" in gateway.refused)
        assert gateway.refused["b"].code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert gateway.refused["b"].retry_after_s > 0
        await gateway.close()
        await worker.close()
