"""The link outlives the scheduler: followed by offset, submitted again, a pause with a bound; readiness and drain."""

import asyncio
import json
import os
import signal
import sys
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway.feed import BEYOND
from laps_sd.client import AsyncClient
from laps_sd.client.base import SERVICE
from protos import version
from protos.errors import BadInput, Lost, NotServing
from protos.idempotence import same
from protos.link.v1 import gateway_link_pb2 as pb
from protos.models import digest
from protos.v1 import types_pb2
from tests.gateway.harness import TOKENIZER, WAIT_S, Scheduler, ending, gateway, ids, model_info, stack
from tests.gateway.test_stream import begin, finish
from tests.waiting import until

HEALTH = health_pb2.HealthCheckResponse


async def readiness(target: str, service: str = SERVICE) -> int:
    async with grpc.aio.insecure_channel(target) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)


async def test_a_restarted_scheduler_is_followed_by_offset_and_the_client_sees_no_seam() -> None:
    async with stack() as (scheduler, link, client):
        task, submit = await begin(client, link)
        tokens = ids("the quick brown fox jumps")
        await link.delta(submit, 0, tokens[:3])
        await scheduler.stop()
        await scheduler.start()
        link = await scheduler.link()
        follow = await link.next("follow")
        assert (follow.request_id, follow.offset) == (submit.request_id, 3)
        await link.delta(submit, 0, tokens[:3])  # a round that was seen before
        await link.delta(submit, 3, tokens[3:], ending=ending())
        assert (await finish(task)).token_ids == tokens


async def test_a_new_link_says_which_model_the_gateway_has_so_that_it_need_not_be_sent() -> None:
    async with stack() as (scheduler, link, client):
        assert version.MODEL_KEY not in link.metadata
        sent = scheduler.serving.model
        scheduler.serving = pb.Serving(ready=True)
        link.cut.set()
        link = await scheduler.link()
        assert link.metadata[version.MODEL_KEY] == digest(sent)
        await client.ready(WAIT_S)


async def test_a_scheduler_that_falls_silent_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gateway.harness.BEAT_S", 0.1)
    monkeypatch.setattr("protos.silence.SILENT_S", 1.0)
    async with stack() as (scheduler, link, client):
        task, submit = await begin(client, link)
        link.silent = True
        link = await scheduler.link()
        assert (await link.next("follow")).request_id == submit.request_id
        task.cancel()


async def test_of_two_schedulers_the_one_that_leads_is_found() -> None:
    first, second = Scheduler(), Scheduler()
    await first.start()
    await second.start()
    await second.stop()
    async with gateway(second, first) as served:
        link = await first.link()
        async with AsyncClient(served.grpc, max_retries=0) as client:
            await client.ready(WAIT_S)
            task, submit = await begin(client, link)
            await second.start()
            await first.stop()
            link = await second.link()
            assert (await link.next("follow")).request_id == submit.request_id
            await link.delta(submit, 0, [40], ending=ending())
            assert (await finish(task)).token_ids == [40]
    await second.stop()


async def test_an_unacknowledged_submission_is_sent_again() -> None:
    async with stack() as (scheduler, link, client):
        task = asyncio.create_task(client.complete("the fox"))
        submit = await link.next("submit")
        link.cut.set()
        link = await scheduler.link()
        assert same(await link.accept(), submit)
        await link.delta(submit, 0, [40], ending=ending())
        assert (await finish(task)).token_ids == [40]


async def test_a_cancel_survives_the_connection_that_should_have_carried_it() -> None:
    async with stack() as (scheduler, link, client):
        task, submit = await begin(client, link)
        await scheduler.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await scheduler.start()
        link = await scheduler.link()
        kinds = [await asyncio.wait_for(link.received.get(), WAIT_S) for _ in range(2)]
        assert kinds[0].follow.request_id == kinds[1].cancel.request_id == submit.request_id


async def test_a_scheduler_that_is_not_yet_able_is_asked_again() -> None:
    async with stack() as (scheduler, link, client):
        task, submit = await begin(client, link)
        link.cut.set()
        link = await scheduler.link()
        await link.next("follow")
        code = grpc.StatusCode.UNAVAILABLE.value[0]
        await link.send(refusals=[{"request_id": submit.request_id, "code": code, "retry_after_s": 0.001}])
        assert (await link.next("follow")).request_id == submit.request_id
        await link.delta(submit, 0, [40], ending=ending())
        await finish(task)


async def test_the_pause_has_an_end_and_who_is_told_to_try_again_finds_the_request() -> None:
    async with stack(reconnect_timeout_s=0.2) as (scheduler, link, client):
        task, submit = await begin(client, link)
        await scheduler.stop()
        with pytest.raises(NotServing, match=r"0\.2 s"):
            await finish(task)
        await scheduler.start()
        link = await scheduler.link()
        await client.ready(WAIT_S)
        task = asyncio.create_task(client.complete("the fox", request_id=submit.request_id))
        again = await link.accept()  # neither a follow nor a cancel before it
        await link.delta(again, 0, [40], ending=ending())
        assert (await finish(task)).token_ids == [40]


async def test_a_connection_in_time_ends_the_countdown() -> None:
    scheduler = Scheduler()
    await scheduler.start()
    async with gateway(scheduler) as served, AsyncClient(served.grpc, max_retries=0) as client:
        link = await scheduler.link()
        await client.ready(WAIT_S)
        task, submit = await begin(client, link)
        link.cut.set()
        link = await scheduler.link()
        await link.next("follow")
        countdown = served.link._give_up
        assert countdown is not None
        assert countdown.cancelled()
        await link.delta(submit, 0, [40], ending=ending())
        await finish(task)
    await scheduler.stop()


async def test_a_draining_gateway_stays_not_ready() -> None:
    scheduler = Scheduler()
    await scheduler.start()
    async with gateway(scheduler) as served, AsyncClient(served.grpc, max_retries=0) as client:
        link = await scheduler.link()
        await client.ready(WAIT_S)
        await served.drain(0)
        for ready in (False, True):
            await link.send(serving=pb.Serving(ready=ready))

            async def heard(ready: bool = ready) -> bool:
                return served.link.ready == ready

            await until(heard)
        assert await readiness(served.grpc) == HEALTH.NOT_SERVING
    await scheduler.stop()


async def test_a_gateway_whose_scheduler_can_store_nothing_new_is_not_ready_and_lets_it_say_why() -> None:
    scheduler = Scheduler()
    await scheduler.start()
    async with gateway(scheduler) as served, AsyncClient(served.grpc, max_retries=0) as client:
        link = await scheduler.link()
        await client.ready(WAIT_S)
        for refuses, says in ((True, HEALTH.NOT_SERVING), (False, HEALTH.SERVING), (True, HEALTH.NOT_SERVING)):
            await link.send(serving=pb.Serving(ready=True, refuses=refuses))

            async def heard(refuses: bool = refuses) -> bool:
                return served.link.refuses == refuses

            await until(heard)
            assert await readiness(served.grpc) == says
        task = asyncio.create_task(client.complete("the quick"))
        submit = await link.next("submit")
        refusal = NotServing("the store refuses: NOAUTH")
        await link.send(refusals=[pb.Refusal(request_id=submit.request_id, code=14, message=refusal.message)])
        with pytest.raises(NotServing, match="NOAUTH"):
            await task
    await scheduler.stop()


async def test_a_request_that_the_scheduler_forgot_is_data_loss() -> None:
    async with stack() as (scheduler, link, client):
        task, submit = await begin(client, link)
        link.cut.set()
        link = await scheduler.link()
        await link.next("follow")
        code = grpc.StatusCode.NOT_FOUND.value[0]
        await link.send(refusals=[{"request_id": submit.request_id, "code": code, "message": "unknown"}])
        with pytest.raises(Lost):
            await finish(task)


async def test_a_gap_is_followed_once_then_data_loss() -> None:
    async with stack() as (_, link, client):
        task, submit = await begin(client, link)
        await link.delta(submit, 5, [40])
        assert (await link.next("follow")).offset == 0
        await link.delta(submit, 5, [40])
        with pytest.raises(Lost):
            await finish(task)
        assert (await link.next("follow")).offset == BEYOND  # to hear of its end
        assert (await link.next("cancel")).request_id == submit.request_id


async def test_streams_that_outlive_the_drain_are_told_and_run_on() -> None:
    scheduler = Scheduler()
    await scheduler.start()
    async with gateway(scheduler) as served, AsyncClient(served.grpc, max_retries=0) as client:
        link = await scheduler.link()
        await client.ready(WAIT_S)
        task, submit = await begin(client, link)
        await served.drain(0)
        with pytest.raises(NotServing, match="stopped"):
            await finish(task)
        assert submit.request_id not in served.link.feeds
    assert link.received.empty()  # who tries again, by its id at another gateway, gets all of it
    await scheduler.stop()


async def test_a_new_fingerprint_brings_its_own_tokenizer() -> None:
    async with stack() as (_, link, client):
        template = "<eos>{{ messages[0].content }}"
        await link.send(serving=pb.Serving(ready=True, model=model_info(template=template, fingerprint="two")))
        async with asyncio.timeout(WAIT_S):
            while True:
                task = asyncio.create_task(client.complete(messages=[{"role": "user", "content": "a"}]))
                submit = await link.accept()
                await link.delta(submit, 0, [40], ending=ending())
                await finish(task)
                if list(submit.prompt) == [TOKENIZER.token_to_id("<eos>"), *ids("a")]:
                    break


async def test_what_another_engine_cannot_serve_is_refused_from_then_on() -> None:
    async with stack() as (_, link, client):
        await link.send(serving=pb.Serving(ready=True, model=model_info(refused={"top_k": "not with this engine"})))
        async with asyncio.timeout(WAIT_S):
            while True:
                task = asyncio.create_task(client.complete("a", top_k=3))
                accepting = asyncio.create_task(link.accept())
                await asyncio.wait([task, accepting], return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    accepting.cancel()
                    break
                await link.delta(await accepting, 0, [40], ending=ending())
                await finish(task)
        with pytest.raises(BadInput, match=r"^top_k: not with this engine"):
            await task


async def test_ready_only_with_a_warmed_worker() -> None:
    scheduler = Scheduler()
    scheduler.serving = pb.Serving(ready=False)
    await scheduler.start()
    async with gateway(scheduler) as served, AsyncClient(served.grpc, max_retries=0) as client:
        link = await scheduler.link()
        assert await readiness(served.grpc) == HEALTH.NOT_SERVING
        assert await readiness(served.grpc, "") == HEALTH.SERVING
        with pytest.raises(NotServing, match="no warmed worker"):
            await client.complete("a")
        await link.send(serving=pb.Serving(ready=True, model=model_info()))
        await client.ready(WAIT_S)
    await scheduler.stop()


async def test_without_a_scheduler_every_call_is_unavailable() -> None:
    async with stack() as (scheduler, _, client):
        await scheduler.stop()
        for call in (client.stats(), client.status("r"), client.cancel("r"), client.complete("a")):
            with pytest.raises(NotServing):
                await call


async def test_reflection_lists_the_service() -> None:
    async with stack() as (_, _, client):
        stub = reflection_pb2_grpc.ServerReflectionStub(client._to(0).channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([ask]), timeout=WAIT_S)
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_finished_requests_are_counted() -> None:
    scheduler = Scheduler()
    await scheduler.start()
    async with gateway(scheduler) as served, AsyncClient(served.grpc, max_retries=0) as client:
        link = await scheduler.link()
        await client.ready(WAIT_S)
        task, submit = await begin(client, link)
        await link.delta(submit, 0, [40, 41], drafted=4, accepted=1, ending=ending(preemptions=3))
        await finish(task)
        url = f"http://{served.http}/metrics"
        body = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=WAIT_S).read().decode())
    await scheduler.stop()
    for line in (
        'laps_sd_request_success_total{finished_reason="stop",model_name="tiny"} 1.0',
        'laps_sd_generation_tokens_total{model_name="tiny"} 2.0',
        'laps_sd_request_generation_tokens_bucket{le="2.0",model_name="tiny"} 1.0',
        'laps_sd_time_to_first_token_seconds_count{model_name="tiny"} 1.0',
    ):
        assert line in body


async def test_a_wrong_setting_is_a_sentence_and_exit_2() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "--max-requests", "0", stderr=asyncio.subprocess.PIPE
    )
    _, err = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode == 2
    assert err.decode() == "gateway: max_requests: Input should be greater than or equal to 1\n"


async def test_sigterm_lets_running_streams_end_then_exits_0(tmp_path: Path) -> None:
    scheduler = Scheduler()
    await scheduler.start()
    ready_file = tmp_path / "ready.json"
    arguments = ["--grpc-port", "0", "--http-port", "0", "--scheduler", f"127.0.0.1:{scheduler.port}"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *arguments, "--ready-file", str(ready_file), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        link = await asyncio.wait_for(scheduler.link(), WAIT_S)
        async with AsyncClient(json.loads(ready_file.read_text())["grpc"], max_retries=0) as client:
            await client.ready(WAIT_S)
            task, submit = await begin(client, link)
            os.kill(process.pid, signal.SIGTERM)

            async def draining() -> bool:
                return await readiness(client.target) == HEALTH.NOT_SERVING

            await until(draining)
            with pytest.raises(NotServing, match="draining"):
                await client.complete("too late")
            end = ending(types_pb2.FINISH_REASON_STOP)
            await link.delta(submit, 0, ids("end"), ending=end)
            assert (await finish(task)).text == "end"
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await scheduler.stop()
