"""Redis fails over, with real Sentinels and replicas: the leader finds the new primary, and nothing is lost, repeated
or changed. Hundreds of fail-overs under load are in failover.py, those by `SENTINEL FAILOVER` among them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from redis.asyncio.sentinel import MasterNotFoundError

from protos.v1 import types_pb2
from scheduler_service.leader import Leader
from scheduler_service.store import LostWrites, RedisStore, StoreUnavailable, TooFewReplicas, Verdict, connection
from scheduler_service.store.connection import Sentinels
from tests.scheduler.live import ScriptedGateway, ScriptedWorker, scheduler
from tests.scheduler.redis_group import NAME, Group, Node
from tests.scheduler.store.writes import submission, tokens
from tests.scheduler.test_redis_loss import output
from tests.waiting import until

pytestmark = pytest.mark.redis

Answer = TypeVar("Answer")
STOP = types_pb2.FINISH_REASON_STOP
NAMESPACE = "fails-over"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("group")


@pytest.fixture(scope="module")
def groups() -> Iterator[list[Group]]:
    """The group that all tests of this module share, once one has started it."""
    shared: list[Group] = []
    yield shared
    for group in shared:
        group.kill()


@pytest.fixture
async def group(groups: list[Group], place: Path) -> Group:
    if not groups:
        groups.append(Group(place, NAMESPACE))
        await groups[0].start()
    return groups[0]


@asynccontextmanager
async def stored(group: Group, replicas: int) -> AsyncIterator[RedisStore]:
    store = RedisStore(group.url, namespace=NAMESPACE, replicas=replicas)
    try:
        yield store
    finally:
        await store.close()


async def surely(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """The answer, however often a busy machine is too late with it."""
    answers: list[Answer] = []
    why = ""

    async def answered() -> bool:
        nonlocal why
        try:
            answers.append(await ask())
        except StoreUnavailable as error:
            if type(error) is not StoreUnavailable:
                raise
            why = f"{error}, since {error.__cause__!r}"
        return bool(answers)

    try:
        await until(answered)
    except TimeoutError:
        raise TimeoutError(why) from None
    return answers[0]


async def primary(group: Group) -> Node:
    await until(group.followed)
    found = await group.primary()
    assert found is not None
    return found


async def until_stored(store: RedisStore, told: dict[str, list[int]]) -> None:
    """A leader whose last commits the new primary misses writes them again."""

    async def as_told() -> bool:
        return {id: await output(store, id) for id in told} == told

    await until(as_told)


async def is_killed(group: Group, primary: Node) -> None:
    primary.kill()


async def goes_on(group: Group, replicas: int, fails: Callable[[Group, Node], Awaitable[None]]) -> Node:
    """The primary fails under streams. Returns it."""
    old = await primary(group)
    runs, waits, new = ids = [f"{fails.__name__}-{number}" for number in range(3)]
    async with stored(group, replicas) as store, scheduler(store, policy="fcfs") as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target, slots=4).attach()
        await gateway.until(lambda: gateway.serving.ready)
        for id in (runs, waits):
            await gateway.submit(id)
        await worker.until(runs, waits)
        await worker.report(worker.row(runs, 0, 7))
        await gateway.until(lambda: gateway.tokens.get(runs) == [7])
        await fails(group, old)
        await worker.report(worker.row(runs, 1, 8, 9))
        await gateway.submit(new)
        await gateway.until(lambda: gateway.tokens[runs] == [7, 8, 9] and new in gateway.accepted)
        await group.moved(old)
        await worker.until(runs, waits, new)
        ends = [worker.row(id, 0, 5, finish=STOP) for id in (waits, new)]
        await worker.report(worker.row(runs, 3, 10, finish=STOP), *ends)
        await gateway.until(lambda: gateway.endings.keys() == set(ids))
        assert gateway.tokens == {runs: [7, 8, 9, 10], waits: [5], new: [5]}
        async with stored(group, 0) as at_new:
            await until_stored(at_new, gateway.tokens)
        await gateway.close()
        await worker.close()
    return old


async def test_streams_go_on_when_the_primary_is_killed(group: Group) -> None:
    old = await goes_on(group, 1, is_killed)
    await old.start("--replicaof", "127.0.0.1", str((await group.moved(old)).port))


@asynccontextmanager
async def frozen(nodes: Sequence[Node]) -> AsyncIterator[None]:
    for each in nodes:
        each.freeze()
    try:
        yield
    finally:
        for each in nodes:
            each.thaw()


async def test_a_commit_counts_once_replicas_have_it_however_often_it_is_repeated(group: Group) -> None:
    """A repeated commit writes nothing, and on a connection that has written nothing WAIT has nothing to wait for."""
    behind = group.replicas(await primary(group))
    async with stored(group, replicas=1) as store:
        epoch = await surely(lambda: store.lead(1))
        await surely(lambda: store.commit(epoch, 1, [submission("counts")]))
        async with frozen(behind):
            for _ in range(2):
                with pytest.raises(TooFewReplicas, match="0 of 1 replicas"):
                    await surely(lambda: store.commit(epoch, 2, [tokens("counts", 0, 7)]))
            assert (await surely(store.pulse)).touched > 0  # a standby sees that this leader lives

        async def counts() -> bool:
            try:
                return await store.commit(epoch, 2, [tokens("counts", 0, 7)]) == [Verdict.APPLIED]
            except StoreUnavailable:
                return False

        await until(counts)
        await until_stored(store, {"counts": [7]})


async def test_without_replicas_nothing_is_told_and_readiness_says_why(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_service.persister.REFUSED_S", 0.5)
    behind = group.replicas(await primary(group))
    async with stored(group, replicas=1) as store:
        await until(lambda: connected(store))
        async with AsyncExitStack() as stack:  # sentinels may still move the primary of another test
            leader, target = await surely(lambda: stack.enter_async_context(scheduler(store, policy="fcfs")))
            await nothing_is_told(leader, target, behind)


async def connected(store: RedisStore) -> bool:
    """With the server that Sentinels name: for a while after a fail-over that may be another one."""
    if await connection.has_moved(store._redis):
        await connection.reconnect(store._redis)
        return False
    return True


async def nothing_is_told(leader: Leader, target: str, behind: Sequence[Node]) -> None:
    gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
    await gateway.until(lambda: gateway.serving.ready)
    async with frozen(behind):
        await gateway.submit("unheard")

        async def refused() -> bool:
            return "0 of 1 replicas" in leader.persister.refusal

        await until(refused)
        await gateway.heard_all()
        assert not gateway.accepted
    await gateway.until(lambda: "unheard" in gateway.accepted)
    assert not leader.persister.refusal
    await gateway.cancel("unheard")
    await gateway.until(lambda: "unheard" in gateway.endings)
    await gateway.close()
    await worker.close()


async def test_a_leader_leads_once_replicas_have_what_it_has_read(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_service.leader.FIRST_COMMIT_S", 0.6)
    behind = group.replicas(await primary(group))
    async with stored(group, replicas=1) as store:
        async with frozen(behind):
            with pytest.raises(StoreUnavailable, match="no commit was acknowledged"):
                async with scheduler(store):
                    pass

        async def leads() -> bool:
            try:
                async with scheduler(store) as (leader, _):
                    return isinstance(leader, Leader)
            except StoreUnavailable:
                return False

        await until(leads)


async def test_a_new_primary_that_misses_the_last_commits_says_so(group: Group) -> None:
    """Without replicas to wait for: the leader then writes everything again."""
    old = await primary(group)
    async with stored(group, replicas=0) as store:
        epoch = await surely(lambda: store.lead(1))
        await surely(lambda: store.commit(epoch, 1, [submission("missed")]))
        async with frozen(group.replicas(old)):
            await old.ask("CLIENT KILL TYPE replica")  # else what is under way still reaches them
            await surely(lambda: store.commit(epoch, 2, [tokens("missed", 0, 7)]))
            old.kill()
        new = await group.moved(old)

        async def lost() -> bool:
            try:
                await store.commit(epoch, 3, [])
            except LostWrites:
                return True
            except StoreUnavailable:
                return False
            raise AssertionError("the new primary cannot have commit 2")

        await until(lost)
        await old.start("--replicaof", "127.0.0.1", str(new.port))


async def test_nobody_begins_to_lead_on_a_server_that_is_the_primary_no_more(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes writes for some seconds more. The leader commits elsewhere, so a standby there sees none."""
    old = await primary(group)
    async with stored(group, replicas=0) as store:
        epoch = await surely(lambda: store.lead(1))
        seen = await surely(store.pulse)

        async def names_another(*_: object) -> tuple[str, int]:
            return "127.0.0.1", group.replicas(old)[0].port

        monkeypatch.setattr(Sentinels, "discover_master", names_another)
        with pytest.raises(StoreUnavailable, match="another server is the primary now"):
            await store.lead(2, seen)
        monkeypatch.undo()
        # Lower if the Sentinels meanwhile named a replica that lacks the first lead: no commit waits for replicas here.
        assert (await surely(store.pulse)).epoch <= epoch


async def test_who_was_sent_to_a_replica_at_first_leads_on_the_primary(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sentinels that have not heard of a fail-over yet name the server that was the primary before."""
    replica = group.replicas(await primary(group))[0]

    async def names_the_replica(*_: object) -> tuple[str, int]:
        return "127.0.0.1", replica.port

    async with stored(group, replicas=0) as store:
        monkeypatch.setattr(Sentinels, "discover_master", names_the_replica)
        with pytest.raises(StoreUnavailable):
            await store.lead(1)
        monkeypatch.undo()
        assert await surely(lambda: store.lead(1))


class Says:
    """In place of a client of one Sentinel: after `after_s` it tells the primary's state, or cannot be reached."""

    def __init__(self, port: int, epoch: int, after_s: float = 0.0, down: bool = False) -> None:
        self.connection_pool = self
        self.connection_kwargs = {"host": "sentinel", "port": port}
        self._epoch, self._after_s, self._down = epoch, after_s, down

    async def sentinel_masters(self) -> dict[str, dict[str, Any]]:
        await asyncio.sleep(self._after_s)
        if not self._epoch:
            raise OSError("unreachable")
        state = {"ip": "10.0.0.1", "port": self._epoch, "config-epoch": self._epoch, "num-other-sentinels": 2}
        return {NAME: state | {"is_master": True, "is_sdown": self._down, "is_odown": False}}


async def asked(*sentinels: Says) -> tuple[str, int]:
    found = Sentinels([], sentinel_kwargs={})  # type: ignore[no-untyped-call]
    found.sentinels = sentinels
    return await found.discover_master(NAME)


async def test_the_newest_configuration_of_a_majority_counts() -> None:
    assert await asked(Says(1, epoch=6), Says(2, epoch=7), Says(3, epoch=7, after_s=3600)) == ("10.0.0.1", 7)


async def test_one_sentinel_is_enough_if_no_other_answers() -> None:
    assert await asked(Says(1, epoch=0), Says(2, epoch=7), Says(3, epoch=0)) == ("10.0.0.1", 7)


async def test_a_sentinel_that_fails_without_a_word_is_told_of_by_the_kind_of_its_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def silent(_: Says) -> None:
        raise TimeoutError

    monkeypatch.setattr(Says, "sentinel_masters", silent)
    with pytest.raises(MasterNotFoundError, match="sentinel:1: TimeoutError"):
        await asked(Says(1, epoch=7))


async def test_without_a_primary_it_is_said_what_each_sentinel_told() -> None:
    with pytest.raises(MasterNotFoundError, match="sentinel:1: unreachable; it is down"):
        await asked(Says(1, epoch=0), Says(2, epoch=7, down=True), Says(3, epoch=7, down=True))
