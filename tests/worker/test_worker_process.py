"""The worker as a process: ready when attached, and gone in order."""

import asyncio
import json
import signal
import sys
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.link.v1.worker_link_pb2_grpc import add_WorkerLinkServicer_to_server
from protos.serving import LINK_MESSAGE_BYTES, Server, channel
from tests.worker.eagles import make_eagle
from tests.worker.harness import Tiny
from tests.worker.scripted import ScriptedScheduler, admit
from worker_service.service import SERVICE

DEADLINE_S = 200.0  # to load torch and, once, to compile the kernels takes minutes on a busy machine


async def test_it_is_ready_when_attached_and_sigterm_hands_over_and_ends_it_with_0(tiny: Tiny) -> None:
    scheduler = ScriptedScheduler()
    server = Server([], LINK_MESSAGE_BYTES)
    add_WorkerLinkServicer_to_server(scheduler, server.grpc)
    port = await server.start("127.0.0.1", 0)
    command = [sys.executable, "-m", "worker_service", "--scheduler", f"127.0.0.1:{port}", "--model", str(tiny.folder)]
    command += ["--worker-id", "w1", "--kv-tokens", "512", "--dtype", "float32", "--device", "cpu", "--threads", "1"]
    command += ["--weights", "int8"]  # of which the fingerprint tells, early and late
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(DEADLINE_S):
            assert process.stderr is not None
            listening = json.loads(await process.stderr.readline())
            coming = await scheduler.announced.get()
            assert coming.worker_id == "w1"
            attachment = await scheduler.attached()
            assert attachment.hello.model.fingerprint == coming.model_fingerprint
            assert attachment.hello.worker_id == "w1"
            assert attachment.hello.blocks == 8
            assert attachment.hello.model.context_tokens == 512
            assert attachment.hello.model.eos_ids == [tiny.eos]

            async with channel(listening["health"]) as link:
                health = health_pb2_grpc.HealthStub(link)
                question = health_pb2.HealthCheckRequest(service=SERVICE)
                assert (await health.Check(question)).status == health_pb2.HealthCheckResponse.NOT_SERVING
                await attachment.welcome()
                await attachment.heartbeat()
                assert (await health.Check(question)).status == health_pb2.HealthCheckResponse.SERVING

            await attachment.command(["a"], [admit("a", max_tokens=400)])
            await attachment.report()
            process.send_signal(signal.SIGTERM)
            while not (await attachment.reports.get()).draining:
                pass
            await attachment.command([])
            while not (last := await attachment.reports.get()).leaving:
                pass
            assert (last.session, last.epoch) == (attachment.hello.session, 7)
            attachment.hang_up.set()
            _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await server.stop(0)


async def test_a_worker_that_is_refused_leaves_with_a_sentence_if_it_is_to(tiny: Tiny) -> None:
    server = Server([], LINK_MESSAGE_BYTES)
    add_WorkerLinkServicer_to_server(ScriptedScheduler(refuses="model: another one is served"), server.grpc)
    port = await server.start("127.0.0.1", 0)
    command = [sys.executable, "-m", "worker_service", "--scheduler", f"127.0.0.1:{port}", "--model", str(tiny.folder)]
    process = await asyncio.create_subprocess_exec(*command, "--leave-if-refused", stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(DEADLINE_S):
        _, errors = await process.communicate()
    await server.stop(0)
    assert process.returncode == 2
    assert errors.decode().endswith("worker: the scheduler does not take this worker: model: another one is served\n")


async def test_a_model_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "worker_service", "--model", str(tmp_path / "nothing")]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(DEADLINE_S):
        _, errors = await process.communicate()
    assert process.returncode == 2  # starting it again is of no use
    assert "worker: " in errors.decode()
    assert "Traceback" not in errors.decode()


async def test_a_draft_head_for_another_model_is_a_sentence(tiny: Tiny, tmp_path: Path) -> None:
    head = make_eagle(tmp_path, tiny.model, target_hidden_size=32)
    command = [sys.executable, "-m", "worker_service", "--model", str(tiny.folder), "--drafter", str(head)]
    process = await asyncio.create_subprocess_exec(
        *command, "--kv-tokens", "512", "--device", "cpu", stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(DEADLINE_S):
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert "it was made for hidden states of 32 numbers" in errors.decode().splitlines()[-1]
    assert "Traceback" not in errors.decode()
