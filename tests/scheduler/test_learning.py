"""What the live service learns: off the event loop, across restarts, whatever happens to the training process."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as gateway_pb
from protos.v1 import inference_pb2 as inference_pb
from protos.v1 import status_pb2 as status_pb
from protos.v1 import types_pb2 as types_pb
from scheduler_service import learned
from scheduler_service.core.beliefs import Acceptance
from scheduler_service.core.core import Core
from scheduler_service.core.events import Round, StepDone, Submitted
from scheduler_service.core.lifecycle import State
from scheduler_service.core.policies import make_policy
from scheduler_service.core.probed import FleetProbe
from scheduler_service.core.types import Ended, Finish, Record
from scheduler_service.event_log import replay
from scheduler_service.learned import Learned
from scheduler_service.learning import Learning
from scheduler_service.predictor import PredictorKind
from scheduler_service.predictor.fit import fit
from scheduler_service.predictor.model import Model
from scheduler_service.predictor.online import LEAST_NEW, OnlinePredictor
from scheduler_service.predictor.window import Snapshot, Window, pack, unpack
from scheduler_service.store import MemoryStore, RedisStore, Store
from scheduler_service.trainer import Trainer
from tests.scheduler.builders import request, worker_up
from tests.scheduler.live import ScriptedGateway, ScriptedWorker, scheduler
from tests.waiting import WAIT_S, until

SHORT, LONG = (7, 7, 7), (9, 9, 9)  # prompts of two kinds


class GatedTrainer(Trainer):
    """Fits in this process, once the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.begun = asyncio.Event(), 0

    async def fit(self, snapshot: Snapshot) -> Model:
        self.begun += 1
        await self.gate.wait()
        return fit(Window.of(snapshot))


@pytest.fixture
def store(each_store: Store) -> Store:
    return each_store


def submit(prompt: tuple[int, ...]) -> gateway_pb.Submit:
    return gateway_pb.Submit(prompt=prompt, limits=common_pb.Limits(max_tokens=500))


def finish(learning: Learning, requests: int = LEAST_NEW) -> None:
    """As many short and long answers, as the leader and its core would tell of them."""
    rng = Random(learning._core.fleet.known.length.finished)
    for index in range(requests):
        prompt, tokens = ((SHORT, rng.randint(4, 8)), (LONG, rng.randint(200, 400)))[index % 2]
        acceptance = Acceptance(2, 8, rng.randint(2, 6))
        record = Record(request("r", max_tokens=500), State.FINISHED, 1, tokens, 3, acceptance, True, 1, 0.0, 0, 0.0)
        learning._core.fleet.known.length.observe(tokens)
        learning._core.fleet.known.acceptance.observe(acceptance)
        learning.finished(submit(prompt), Ended(record, Finish.STOP))


@pytest.mark.parametrize(
    ("tokens", "finish", "cut"), [(500, Finish.LENGTH, True), (500, Finish.STOP, False), (499, Finish.LENGTH, False)]
)
async def test_only_an_answer_that_its_bound_has_ended_counts_as_cut(
    store: Store, tokens: int, finish: Finish, cut: bool
) -> None:
    """An end-of-sequence token may be the last one that is allowed; a full context is no bound of the client's."""
    learning = new(store)
    record = Record(request("r", max_tokens=500), State.FINISHED, 1, tokens, 3, Acceptance(), True, 1, 0.0, 0, 0.0)
    learning.finished(submit(SHORT), Ended(record, finish))
    assert learning._predictor is not None
    (example,) = learning._predictor.known().examples
    assert example.cut is cut


async def test_a_request_for_one_token_teaches_nothing(store: Store) -> None:
    """Such are all that want something of their prompt alone: thousands of them must not drown the others."""
    learning = new(store)
    record = Record(request("r", max_tokens=1), State.FINISHED, 1, 1, 3, Acceptance(), True, 1, 0.0, 0, 0.0)
    learning.finished(submit(SHORT), Ended(record, Finish.STOP))
    assert learning._predictor is not None
    assert list(learning._predictor.known().examples) == []
    own = learning._core
    own.observe(worker_up(slots=2), 0.0)
    for id, most in (("one", 1), ("more", 2)):
        own.observe(Submitted(request(id, 0.0, max_tokens=most)), 0.0)
    places = {run.id: run.placement for run in own.plan("w").schedule}
    rounds = [Round(id, place, 0, 1, 0, 0, 4, 0, 1, Finish.STOP) for id, place in places.items()]
    own.observe(StepDone("w", tuple(rounds), 900, 1.0), 1.0)
    assert own.fleet.known.length.finished == 1


def median(learning: Learning, prompt: tuple[int, ...]) -> float:
    expected = learning.expect(submit(prompt))
    assert expected is not None
    assert expected.length is not None
    return expected.length.location


def new(store: Store, trainer: Trainer | None = None) -> Learning:
    return Learning(PredictorKind.ONLINE, Core(make_policy("gittins")), store, trainer)


@contextlib.asynccontextmanager
async def running(learning: Learning) -> AsyncIterator[None]:
    task = asyncio.create_task(learning.run())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def warm(learning: Learning, version: int = 1) -> None:
    async def fitted() -> bool:
        return learning.status is not None and learning.status.version >= version

    await until(fitted)


async def test_a_refit_holds_up_nothing_and_never_meets_another() -> None:
    trainer = GatedTrainer()
    learning = new(MemoryStore(), trainer)
    async with running(learning):
        finish(learning)

        async def began() -> bool:
            return trainer.begun == 1

        await until(began)
        finish(learning, 3 * LEAST_NEW)  # due again, while the first is being fitted
        assert learning.expect(submit(SHORT)) is None
        assert trainer.begun == 1
        trainer.gate.set()
        await warm(learning, version=2)
    assert trainer.begun == 2
    assert median(learning, SHORT) < median(learning, LONG)


async def test_what_was_learned_survives_a_restart(store: Store) -> None:
    trainer = GatedTrainer()
    trainer.gate.set()
    before = new(store, trainer)
    await before.take_over(await store.lead(1000))
    async with running(before):
        finish(before)
        await warm(before)
    await before.save()
    after = new(store)
    await after.take_over(await store.lead(2000))
    assert after.status == before.status
    assert median(after, LONG) == median(before, LONG)
    assert after._core.fleet.known.length == before._core.fleet.known.length
    assert after._core.fleet.known.acceptance == before._core.fleet.known.acceptance


async def test_after_a_restart_it_goes_on_learning_from_what_it_had(store: Store) -> None:
    trainer = GatedTrainer()
    trainer.gate.set()
    before = new(store, trainer)
    await before.take_over(await store.lead(1000))
    async with running(before):
        finish(before)
        await warm(before)
    await before.save()
    after = new(store, trainer)
    await after.take_over(await store.lead(2000))
    async with running(after):
        finish(after)
        await warm(after, version=2)
    assert after.status is not None
    assert after.status.trained_on == 2 * LEAST_NEW


async def unreadable(store: Store, packed: bytes) -> Learning:
    epoch = await store.lead(1000)
    await store.save_learned(epoch, packed)
    learning = new(store)
    await learning.take_over(epoch)
    return learning


async def kept() -> bytes:
    """What a scheduler with a warm predictor keeps."""
    store, trainer = MemoryStore(), GatedTrainer()
    trainer.gate.set()
    learning = new(store, trainer)
    await learning.take_over(await store.lead(1))
    async with running(learning):
        finish(learning)
        await warm(learning)
    await learning.save()
    packed = await store.learned()
    assert packed is not None
    return packed


async def test_damaged_bytes_are_a_cold_start(store: Store) -> None:
    packed, rng = await kept(), Random(1)
    flipped = bytearray(packed)
    flipped[rng.randrange(len(packed))] ^= 1 << rng.randrange(8)
    for damaged in (bytes(flipped), b"", b"nonsense", packed[: len(packed) // 2]):
        learning = await unreadable(store, damaged)
        assert learning.status is not None
        assert (learning.status.word, learning._core.fleet.known.length.finished) == ("cold", 0)


async def test_another_schema_is_a_cold_start(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = await kept()
    monkeypatch.setattr(learned, "SCHEMA", learned.SCHEMA + 1)
    learning = await unreadable(store, packed)
    assert learning._core.fleet.known.length.finished == 0


async def test_features_of_another_version_leave_the_fleets_beliefs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = await kept()
    monkeypatch.setattr(learned, "FEATURES_VERSION", learned.FEATURES_VERSION + 1)
    learning = await unreadable(store, packed)
    assert learning.status is not None
    assert (learning.status.word, learning._core.fleet.known.length.finished) == ("cold", LEAST_NEW)


async def test_what_a_version_without_probes_has_stored_is_taken(store: Store) -> None:
    arrays = unpack(await kept())
    header = json.loads(str(arrays["header"]))
    del header["probe"]
    earlier = pack(arrays | {"header": np.array(json.dumps(header))}, compress=True)
    learning = await unreadable(store, earlier)
    assert learning.status is not None
    assert learning.status.word == "warm"
    assert learning._core.fleet.known.probe == FleetProbe()


async def test_what_another_models_answers_taught_is_forgotten(store: Store) -> None:
    before = await unreadable(store, await kept())
    assert not before.serve("f")  # of which model the stored answers were is not known
    finish(before)
    await before.save()
    after = new(store)
    await after.take_over(await store.lead(2000))
    assert not after.serve("f")
    assert after._core.fleet.known.length.finished == 2 * LEAST_NEW
    assert after.serve("g")
    assert after.status is not None
    assert (after.status.word, after._core.fleet.known.length.finished) == ("cold", 0)
    assert after.expect(submit(SHORT)) is None


async def test_a_fit_to_another_models_answers_is_not_used() -> None:
    trainer = GatedTrainer()
    learning = new(MemoryStore(), trainer)
    learning.serve("f")
    async with running(learning):
        finish(learning, 2 * LEAST_NEW)

        async def began() -> bool:
            return trainer.begun == 1

        await until(began)
        learning.serve("g")
        trainer.gate.set()
        finish(learning)
        await warm(learning)
        assert learning.status is not None
        assert learning.status.trained_on == LEAST_NEW


async def test_a_training_process_that_crashes_costs_one_refit() -> None:
    trainer = Trainer((sys.executable, "-c", "raise SystemExit(1)"))
    learning = new(MemoryStore(), trainer)
    async with running(learning):
        finish(learning)

        async def tried() -> bool:
            return learning._predictor is not None and not learning._predictor.due

        await until(tried)
        trainer._command = Trainer()._command
        finish(learning)
        await warm(learning)
    assert median(learning, SHORT) < median(learning, LONG)


async def test_a_mistake_in_learning_ends_no_leadership(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one where a model is put to use nor one where it is saved."""
    monkeypatch.setattr("scheduler_service.learning.SAVE_EVERY_S", 0.0)
    mistakes: list[str] = []
    trainer = GatedTrainer()
    trainer.gate.set()
    learning = new(MemoryStore(), trainer)
    with monkeypatch.context() as mistaken:
        for owner, name in ((OnlinePredictor, "installing"), (Learned, "encode")):

            def raises(*_: object, name: str = name) -> None:
                mistakes.append(name)
                raise IndexError("a mistake")

            mistaken.setattr(owner, name, raises)
        async with running(learning):
            finish(learning)

            async def both() -> bool:
                return {"installing", "encode"} <= set(mistakes)

            await until(both)
            await learning.close()
            mistaken.undo()
            finish(learning)
            await warm(learning)


async def test_live_a_short_kind_is_expected_to_be_shorter(redis_url: str, namespace: str) -> None:
    """Over gRPC, with the training process; the second scheduler knows it from Redis."""
    store = RedisStore(redis_url, namespace=namespace, timeout_s=WAIT_S)
    async with scheduler(store) as (leader, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        for index in range(LEAST_NEW):
            id, (prompt, tokens) = f"r{index}", ((SHORT, 2 + index % 4), (LONG, 60 + index % 9))[index % 2]
            await gateway.submit(id, *prompt, max_tokens=100)
            await worker.until(id)
            row = worker.row(id, 0, *range(tokens), finish=types_pb.FINISH_REASON_STOP, drafted=4, accepted=2)
            await worker.report(row)
        await gateway.until(lambda: len(gateway.endings) == LEAST_NEW)
        await warm(leader.learning)
        stats = await gateway.unary.Stats(inference_pb.StatsRequest())
        assert (stats.predictor.state, stats.predictor.finished) == (status_pb.PREDICTOR_STATE_WARM, LEAST_NEW)
        await gateway.close()
        await worker.close()
    async with scheduler(store) as (leader, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        for id, prompt in (("short", SHORT), ("long", LONG)):
            await gateway.submit(id, *prompt, max_tokens=100)
        await gateway.until(lambda: gateway.accepted >= {"short", "long"})
        core = leader.core
        assert core.fleet.entries["short"].predicted_tokens < 10
        assert core.fleet.entries["long"].predicted_tokens > 40
        await gateway.close()
        await worker.close()
    await store.close()


async def test_the_event_log_replays_that_it_was_forgotten(tmp_path: Path) -> None:
    store, path = MemoryStore(), tmp_path / "events.jsonl"
    before = await unreadable(store, await kept())
    before.serve("of another model")
    finish(before)
    await before.save()
    async with scheduler(store, policy="gittins", event_log=path) as (leader, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        assert leader.core.fleet.known.length.finished == 0
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a", max_tokens=100)
        await worker.until("a")
        await gateway.close()
        await worker.close()
    core = Core(make_policy("gittins"))
    assert all(logged == rebuilt for _, logged, rebuilt in replay(path, lambda: core))
    assert core.fleet.known.length.finished == 0


async def test_the_event_log_replays_what_was_learned_and_expected(tmp_path: Path) -> None:
    store, path = MemoryStore(), tmp_path / "events.jsonl"
    await store.save_learned(await store.lead(1), await kept())
    async with scheduler(store, policy="gittins", event_log=path) as (leader, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("long", *LONG, max_tokens=100)
        await worker.until("long")
        await gateway.submit("short", *SHORT, max_tokens=100)
        await worker.until("short", "long")  # it overtakes, for what is expected of it
        assert leader.core.fleet.entries["short"].length.location < leader.core.fleet.entries["long"].length.location
        await worker.report(worker.row("short", 0, 7, drafted=4, accepted=1))
        await worker.next_command()
        await gateway.close()
        await worker.close()
    plans = list(replay(path, lambda: Core(make_policy("gittins"))))
    assert len(plans) > 3
    assert all(logged == rebuilt for _, logged, rebuilt in plans)


async def test_without_a_predictor_only_the_fleets_beliefs_are_learned(store: Store) -> None:
    learning = Learning(PredictorKind.NONE, Core(make_policy("gittins")), store)
    await learning.take_over(await store.lead(1000))
    finish(learning)
    assert learning.expect(submit(SHORT)) is None
    await learning.save()
    after = new(store)
    await after.take_over(await store.lead(2000))
    assert after._core.fleet.known.length.finished == LEAST_NEW


async def test_a_leader_without_a_predictor_keeps_what_predictors_have_learned(store: Store) -> None:
    trainer = GatedTrainer()
    trainer.gate.set()
    before = new(store, trainer)
    await before.take_over(await store.lead(1000))
    async with running(before):
        finish(before)
        await warm(before)
    await before.save()
    without = Learning(PredictorKind.NONE, Core(make_policy("gittins")), store)
    await without.take_over(await store.lead(2000))
    finish(without)
    await without.save()
    after = new(store)
    await after.take_over(await store.lead(3000))
    assert after._core.fleet.known.length.finished == 2 * LEAST_NEW
    assert median(after, LONG) == median(before, LONG)
