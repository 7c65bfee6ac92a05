"""Stages as processes: they find each other, none outlives the others, and a wrong set-up is a sentence."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from laps_sd.ports import claim_ports
from protos.link.v1.worker_link_pb2_grpc import add_WorkerLinkServicer_to_server
from protos.serving import LINK_MESSAGE_BYTES, Server
from tests.tiny_model import make_tiny_model
from tests.waiting import until
from tests.worker.harness import Driver, Tiny
from tests.worker.preloaded import Worker
from tests.worker.scripted import PROMPT, Attachment, ScriptedScheduler, admit
from tests.worker.staged import staged_engine
from worker_service.engine.types import Limits, Sampling

DEADLINE_S = 120.0
GREEDY, SAMPLED = Sampling(), Sampling(temperature=1, seed=5)  # the latter is what a scripted scheduler asks for
Start = Callable[..., Worker]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("deep"), layers=3)


@pytest.fixture
def start(deep: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a stage; the rendezvous is the same for all."""
    (port,) = claim_ports(0)
    started: list[Worker] = []

    def one(stage: int, stages: int, *flags: str, model: Path = deep) -> Worker:
        words = ["--model", str(model), "--stages", str(stages), "--stage", str(stage)]
        words += ["--rendezvous", f"127.0.0.1:{port}", "--dtype", "float32", "--device", "cpu", "--threads", "1"]
        words += ["--kv-tokens", "512", "--drafter", "ngram", *flags]
        started.append(Worker(words, tmp_path / f"{len(started)}.log"))
        return started[-1]

    yield one
    for worker in started:
        worker.kill()


@asynccontextmanager
async def serving(start: Start, stages: int, *flags: str) -> AsyncIterator[tuple[list[Worker], Attachment]]:
    scheduler = ScriptedScheduler()
    server = Server([], LINK_MESSAGE_BYTES)
    add_WorkerLinkServicer_to_server(scheduler, server.grpc)
    port = await server.start("127.0.0.1", 0)
    try:
        workers = [start(number, stages, "--scheduler", f"127.0.0.1:{port}", *flags) for number in range(stages)]
        async with asyncio.timeout(DEADLINE_S):
            attachment = await scheduler.attached()
            await attachment.welcome()
            await attachment.heartbeat()
        yield workers, attachment
    finally:
        await server.stop(0)


async def output(attachment: Attachment, name: str, count: int, sampling: Sampling = SAMPLED) -> list[int]:
    asked = admit(name, max_tokens=count)
    asked.sampling.temperature = sampling.temperature
    await attachment.command([name], [asked])
    tokens: list[int] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(tokens) < count:
            tokens += (await attachment.report()).rows[0].tokens
    return tokens


async def test_three_stages_serve_the_text_of_one_process_and_all_end_when_one_dies(
    deep: Path, tiny: Tiny, start: Start
) -> None:
    alone, samplings = Driver(staged_engine(deep, 1)), {"greedy": GREEDY, "sampled": SAMPLED}
    for name, sampling in samplings.items():
        alone.admit(name, PROMPT, Limits(max_tokens=12, ignore_eos=True), sampling)
    alone.finish_all()
    async with serving(start, 3) as (workers, attachment):
        assert attachment.hello.max_draft == 16
        for name, sampling in samplings.items():
            assert await output(attachment, name, 12, sampling) == alone.outputs[name]
        workers[2].kill()  # while nothing is computed
        codes = await asyncio.gather(*(asyncio.to_thread(worker.wait, DEADLINE_S) for worker in workers[:2]))
    assert codes == [1, 1]
    assert "worker, stage 0 of 3: stage 2 is gone" in workers[0].said()
    assert "worker, stage 1 of 3: stage " in workers[1].said()
    assert "Traceback" not in workers[0].said() + workers[1].said()


async def test_stages_end_in_peace_with_the_first(start: Start) -> None:
    async with serving(start, 2) as (workers, attachment):
        os.kill(workers[0].pid, signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            while not (await attachment.reports.get()).draining:
                pass
            await attachment.command([])
            while not (await attachment.reports.get()).leaving:
                pass
        attachment.hang_up.set()
        assert [await asyncio.to_thread(worker.wait, DEADLINE_S) for worker in workers] == [0, 0]


async def test_a_stage_that_hangs_ends_the_first_which_ends_the_others(start: Start) -> None:
    async with serving(start, 3, "--step-timeout-s", "1") as (workers, attachment):
        os.kill(workers[1].pid, signal.SIGSTOP)
        await attachment.command(["a"], [admit("a", max_tokens=12)])
        assert await asyncio.to_thread(workers[0].wait, DEADLINE_S) == 1
        assert '"event": "hung"' in workers[0].said()
        os.kill(workers[1].pid, signal.SIGCONT)
        assert [await asyncio.to_thread(worker.wait, DEADLINE_S) for worker in workers[1:]] == [1, 1]


def test_a_killed_first_stage_ends_the_others_with_a_sentence(start: Start) -> None:
    first, second = start(0, 2, "--scheduler", "127.0.0.1:1"), start(1, 2)

    async def warmed() -> bool:
        return '"event": "warmed"' in first.said()

    asyncio.run(until(warmed, DEADLINE_S))
    first.kill()
    assert second.wait(DEADLINE_S) == 1
    assert "worker, stage 1 of 2: stage 0 is gone" in second.said()
    assert "Traceback" not in second.said()


@pytest.mark.parametrize("stage", [0, 1])
def test_ctrl_c_ends_a_stage_that_waits_for_the_others_without_a_traceback(start: Start, stage: int) -> None:
    worker = start(stage, 2, "--scheduler", "127.0.0.1:1")

    async def waits() -> bool:
        return '"event": "meeting"' in worker.said()

    asyncio.run(until(waits, DEADLINE_S))
    os.kill(worker.pid, signal.SIGINT)
    assert worker.wait(DEADLINE_S) == 128 + signal.SIGINT
    assert "Traceback" not in worker.said()


def test_a_stage_that_does_not_fit_is_refused_and_the_right_one_still_comes(start: Start, tmp_path: Path) -> None:
    first = start(0, 2, "--scheduler", "127.0.0.1:1")
    other = make_tiny_model(tmp_path / "other", layers=3, seed=1)
    refused = {
        start(2, 3): "it is stage 2 of 3, where --stages is 2",
        start(1, 2, model=other): "its model is ",
        start(1, 2, "--dtype", "bfloat16"): "its dtype is torch.bfloat16, that of stage 0 torch.float32",
    }
    for worker, why in refused.items():
        assert worker.wait(DEADLINE_S) == 2
        assert f"this stage is refused: {why}" in worker.said().splitlines()[-1]
    start(1, 2)

    async def warmed() -> bool:
        return '"event": "warmed"' in first.said()

    asyncio.run(until(warmed, DEADLINE_S))


def test_who_is_no_stage_is_a_sentence_at_both_ends(deep: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_says_something_else, args=(server,), daemon=True).start()
        words = ["--model", str(deep), "--stages", "2", "--stage", "1", "--device", "cpu"]
        worker = Worker([*words, "--rendezvous", f"127.0.0.1:{server.getsockname()[1]}"], tmp_path / "log")
        assert worker.wait(DEADLINE_S) == 2
    assert "what answers there is no stage of LAPS-SD" in worker.said()


def _says_something_else(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection, suppress(ConnectionResetError):
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        while connection.recv(1024):
            pass


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--stages", "4", "--rendezvous", "127.0.0.1:9"], "has 3 layers, which cannot be spread over 4 stages"),
        (["--stages", "2"], "rendezvous: say where stage 0 is found, HOST:PORT, the same to all stages"),
        (["--stages", "2", "--stage", "2", "--rendezvous", "127.0.0.1:9"], "stage: 2 is none of the stages 0 to 1"),
        (
            ["--stages", "2", "--rendezvous", "127.0.0.1:9", "--weights", "int8"],
            "weights: int8 is of one process alone",
        ),
        (["--stages", "2", "--rendezvous", "nowhere"], "rendezvous: 'nowhere' is not HOST:PORT"),
        (["--stages", "2", "--rendezvous", "h:0"], "rendezvous: 'h:0' is not HOST:PORT"),
        (["--stages", "2", "--rendezvous", "10.1.2.3:9"], "nor authenticated: say --insecure on a closed network"),
        (["--stages", "2", "--rendezvous", "192.0.2.1:9", "--insecure"], "no address of this machine, which leads"),
        (["--stage", "1"], "stages: 1 is a whole model, which has neither --stage nor --rendezvous"),
    ],
)
def test_a_wrong_set_up_is_a_sentence_and_no_reason_to_start_again(
    deep: Path, tmp_path: Path, flags: list[str], problem: str
) -> None:
    worker = Worker(["--model", str(deep), "--device", "cpu", *flags], tmp_path / "log")
    assert worker.wait(DEADLINE_S) == 2
    assert problem in worker.said().splitlines()[-1]
    assert "Traceback" not in worker.said()
