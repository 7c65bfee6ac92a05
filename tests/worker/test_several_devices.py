"""One model over two processes, on two CPUs with gloo: the same text, and no process outlives the other."""

import asyncio
import json
import os
from collections import deque
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from random import Random

import psutil
import pytest
import torch

from laps_sd.stack import Options, claim_ports, worker_command
from protos.link.v1.worker_link_pb2_grpc import add_WorkerLinkServicer_to_server
from protos.serving import LINK_MESSAGE_BYTES, Server
from tests.gpu.forking import Forking
from tests.tiny_model import make_tiny_model
from tests.waiting import until
from tests.worker.harness import Driver, Tiny
from tests.worker.preloaded import Worker
from tests.worker.scripted import PROMPT, ScriptedScheduler, admit
from tests.worker.test_branches import answered, texts
from tests.worker.test_exactness import TEXTS, greedy_differences
from worker_service.engine.drafting.drafter import NoDrafter
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.parallel import ParallelError, ProcessGroup, Ranks
from worker_service.engine.types import Limits, Run, Sampling
from worker_service.model_files import ModelError
from worker_service.models import load

DEADLINE_S = 200.0  # to load torch can take most of a minute on a busy machine
OPTIONS = ["--dtype", "float32", "--device", "cpu", "--threads", "1", "--kv-tokens", "512", "--drafter", "ngram"]


def worker(tiny: Tiny, rank: int, said: Path, *flags: str) -> Worker:
    """One of two processes that share the model."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return Worker(["--model", str(tiny.folder), *OPTIONS, *flags], said, place)


@pytest.fixture
def follower(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A worker that follows another, or this process."""
    (port,) = claim_ports(0)
    # What torchrun sets.
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    process = worker(tiny, 1, tmp_path / "follower.log")
    yield process
    process.kill()


@pytest.fixture
def group(follower: Worker) -> Iterator[ProcessGroup]:
    yield ProcessGroup(Ranks.from_environment(), torch.device("cpu"))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_greedy_equals_generate_while_requests_are_preempted_in_all_ways(
    tiny: Tiny, group: ProcessGroup, follower: Worker
) -> None:
    model = load(str(tiny.folder), "cpu", "float32", group.ranks)
    group.loaded()
    # Memory for half of the requests, host memory for two: both run out.
    options = {"context_tokens": 1024, "blocks": 24, "block_tokens": 8, "host_blocks": 12}
    engine = Engine(model.model, tiny.tokenizer, eos_ids=model.eos_ids, drafter=NgramDrafter(), group=group, **options)  # type: ignore[arg-type]
    driver, random = Driver(engine), Random(0)
    for i, text in enumerate(TEXTS[:6]):
        driver.admit(str(i), tiny.prompt(text), Limits(max_tokens=30))
    offloaded = 0
    for _ in range(2000):
        if not (live := [name for name in driver.admitted if name not in driver.finished]):
            break
        random.shuffle(live)
        driver.step((Run(name, random.randint(0, 6), random.randint(0, 20)) for name in live), slots=4)
        if random.random() < 0.3:
            engine.offload(live[0])
            offloaded += engine._requests[live[0]].saved is not None
            engine.drop(live[-1])
    assert len(driver.finished) == len(driver.admitted)
    for name, (prompt, _, _) in driver.admitted.items():
        reference = tiny.model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)
        output = driver.outputs[name]
        assert output == reference[0, len(prompt) :].tolist() or not greedy_differences(tiny, prompt, output)
    assert offloaded > 2
    assert sum(row.accepted for row in driver.rows) > 20
    assert engine.free_blocks == engine.blocks
    group.leave()
    assert follower.wait(DEADLINE_S) == 0, follower.said()


def test_a_branch_that_is_followed_changes_no_text(tiny: Tiny, group: ProcessGroup, follower: Worker) -> None:
    plain = answered(tiny, tiny.engine(drafter=NoDrafter(), block_tokens=16), Sampling())
    model = load(str(tiny.folder), "cpu", "float32", group.ranks)
    group.loaded()
    drafter = Forking(texts(tiny, plain))
    options = {"eos_ids": model.eos_ids, "context_tokens": 1024, "blocks": 64, "block_tokens": 16}
    forked = answered(tiny, Engine(model.model, tiny.tokenizer, drafter=drafter, group=group, **options), Sampling())  # type: ignore[arg-type]
    assert forked.outputs == plain.outputs
    assert len(forked.rows) < 0.7 * len(plain.rows), "branches were not followed"
    group.leave()
    assert follower.wait(DEADLINE_S) == 0, follower.said()


async def test_torchrun_serves_the_text_of_one_process_and_a_killed_follower_ends_it(tiny: Tiny) -> None:
    alone = Driver(tiny.engine())
    alone.admit("a", PROMPT, Limits(max_tokens=12, ignore_eos=True), Sampling(temperature=1, seed=5))
    alone.finish_all()

    scheduler = ScriptedScheduler()
    server = Server([], LINK_MESSAGE_BYTES)
    add_WorkerLinkServicer_to_server(scheduler, server.grpc)
    port = await server.start("127.0.0.1", 0)
    options = Options(devices=2, device="cpu", dtype="float32", drafter="ngram", kv_tokens=512)
    command = worker_command(options, 0, f"127.0.0.1:{port}", tiny.folder)
    process = await asyncio.create_subprocess_exec(
        *command.arguments, env=os.environ | command.environment, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            attachment = await scheduler.attached()
            await attachment.welcome()
            await attachment.command(["a"], [admit("a", max_tokens=12)])
            output: list[int] = []
            while len(output) < 12:
                output += (await attachment.report()).rows[0].tokens
            assert output == alone.outputs["a"]

            family = psutil.Process(process.pid).children(recursive=True)
            follower = next(child for child in family if child.environ().get("RANK") == "1")
            await attachment.command(["b"], [admit("b", max_tokens=400)])
            await attachment.report()
            follower.kill()
            _, errors = await process.communicate()
        assert process.returncode == 1
        assert "Signal 9 (SIGKILL)" in errors.decode()  # torchrun's: it may end the leader before that notices
        assert not psutil.wait_procs(family, timeout=DEADLINE_S)[1]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await server.stop(0)


def test_a_leader_is_told_that_its_follower_died(group: ProcessGroup, follower: Worker) -> None:
    group.loaded()
    follower.kill()
    follower.wait(DEADLINE_S)
    with pytest.raises(ParallelError, match="a process that holds a share of the model is gone"):
        deque(map(group.call, repeat("", 1000)))  # what the sockets take is no proof that anybody reads


async def test_a_follower_ends_with_a_sentence_when_its_leader_dies(
    tiny: Tiny, tmp_path: Path, follower: Worker
) -> None:
    leader = worker(tiny, 0, tmp_path / "leader.log", "--scheduler", "127.0.0.1:1")

    async def warmed() -> bool:
        return '"event": "warmed"' in leader.said()

    try:
        await until(warmed, DEADLINE_S)
    finally:
        leader.kill()
    assert follower.wait(DEADLINE_S) == 1
    assert "worker, process 2 of 2: the process that leads is gone" in follower.said()
    assert "Traceback" not in follower.said()


def test_heads_that_do_not_divide_are_refused(tiny: Tiny) -> None:
    with pytest.raises(ModelError, match="4 heads with 2 for keys and values, which do not divide by 4"):
        load(str(tiny.folder), "cpu", "float32", Ranks(0, 4, 0))


def test_a_model_that_transformers_cannot_split_is_refused(tmp_path: Path) -> None:
    config = make_tiny_model(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "gpt2"}))
    with pytest.raises(ModelError, match="no plan to split the heads of a gpt2 model"):
        load(str(tmp_path), "cpu", "float32", Ranks(0, 2, 0))
