"""Redis and its twin in memory answer alike, whatever is asked of them in whatever order: a hypothesis state machine.

`EXAMPLES=2000 pytest tests/scheduler/test_store_machine.py` runs more of it.
"""

import asyncio
import copy
import os
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import redis.asyncio as aioredis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from scheduler_service.core.beliefs import Acceptance
from scheduler_service.core.lifecycle import State
from scheduler_service.core.types import Record
from scheduler_service.store import Fenced, LostWrites, MemoryStore, Pulse, RedisStore, Store, Stored, Unreadable, Write
from scheduler_service.store.rounds import decode, encode
from tests.scheduler.builders import request
from tests.waiting import WAIT_S

IDS = ("a", "b", "c")
KEEP_S = 60
ENDS = (State.FINISHED, State.CANCELLED, State.EXPIRED, State.FAILED)
EPOCHS = st.integers(0, 2)  # of which reign: the newest, or one before
# What a leader writes of a request: mostly what follows its past, at times what does not.
MOVES = st.tuples(
    st.sampled_from(IDS),
    st.sampled_from(["submit", "submit", "tokens", "tokens", "round", "round", "change", "end", "end with tokens"]),
    st.integers(1, 3),  # tokens, and queue level
    st.sampled_from([0, 0, 0, 0, 0, 0, 1, -1]),  # off the right start
    st.sampled_from([1.0, 1.0, 1.0, 2.0]),  # arrival: another one is another request
    st.booleans(),  # with KV
)


class Twins(RuleBasedStateMachine):
    """Every operation is done to both, and every answer compared; after each, all that they hold."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.now = 0.0
        self.memory = MemoryStore(keep_s=KEEP_S, clock=lambda: self.now)
        self.redis = RedisStore(self.url, namespace=f"machine-{uuid.uuid4().hex}", keep_s=KEEP_S, timeout_s=WAIT_S)
        self.raw = aioredis.Redis.from_url(self.url)
        self.epochs = [self.both(lambda store: store.lead(1))]
        self.numbers = {self.epochs[0]: 0}  # of the last commit that each reign made
        self.last: tuple[int, int, list[Write]] | None = None
        self.backup: tuple[MemoryStore, dict[bytes, tuple[bytes, int]]] | None = None

    def teardown(self) -> None:
        async def close() -> None:
            if keys := await self._keys():
                await self.raw.delete(*keys)
            await self.raw.aclose()
            await self.redis.close()

        self.runner.run(close())
        self.runner.close()

    async def _keys(self) -> list[bytes]:
        return [key async for key in self.raw.scan_iter(match=f"{self.redis.keys._prefix}:*")]

    def both(self, ask: Callable[[Store], Awaitable[Any]]) -> Any:
        """What both answer; what both raise is raised."""
        answers = [self.runner.run(_outcome(ask(store))) for store in (self.memory, self.redis)]
        assert _comparable(answers[0]) == _comparable(answers[1])
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    def stored(self, id: str) -> Stored | None:
        stored = self.memory.requests.get(id)
        return stored if isinstance(stored, Stored) else None

    def reign(self, back: int) -> int:
        return self.epochs[max(0, len(self.epochs) - 1 - back)]

    def write(self, move: tuple[str, str, int, int, float, bool]) -> Write:
        id, kind, some, off, arrival, with_kv = move
        stored = self.stored(id)
        start = max(0, (stored.record.emitted if stored else 0) + off)
        new = some if "tokens" in kind or kind == "round" else 0
        state = ENDS[some] if "end" in kind else State.RUNNING if with_kv else State.WAITING
        record = Record(
            request=request(id, arrival, deadline=99.5),
            state=state,
            placement=some,
            emitted=0 if kind == "submit" else start + new,
            prefilled=4,
            acceptance=Acceptance(some, 8, 2, 1, (0.5, 0.25)),
            perceptible=with_kv,
            level=some,
            key=some / 4 + arrival,
            preemptions=1,
            started=None,
        )
        tokens = encode(range(start, start + new), 4, 1) if new else b""
        if brief := kind == "round" and stored is not None:  # nothing else changes
            record = replace(stored.record, request=record.request)
        return Write(
            record,
            submit=b"payload " + id.encode() if kind == "submit" else None,
            start=start if new else None,
            log=tokens,
            ending=b"over" if "end" in kind else None,
            brief=brief,
            tokens=new if brief else 0,
        )

    @rule(now_ms=st.integers(1, 50), ago=st.integers(0, 1), look=st.booleans())
    def take_over(self, now_ms: int, ago: int, look: bool) -> None:
        pulse = self.both(lambda store: store.pulse())
        seen = replace_pulse(pulse, ago) if look else None
        try:
            epoch = self.both(lambda store: store.lead(now_ms, seen))
        except Fenced:
            assert ago
            return
        self.epochs.append(epoch)
        self.numbers[epoch] = 0

    @rule(back=EPOCHS, skipped=st.sampled_from([0, 0, 0, 0, 1]), moves=st.lists(MOVES, max_size=4))
    def commit(self, back: int, skipped: int, moves: list[Any]) -> None:
        epoch = self.reign(back)
        arrivals = {id: arrival for id, *_, arrival, _ in reversed(moves)}
        moves = [move for move in moves if move[4] == arrivals[move[0]]]  # a commit knows one request of an id
        number, writes = self.numbers[epoch] + 1 + skipped, [self.write(move) for move in moves]
        ids = [write.record.request.id for write in writes]  # a brief one follows what is stored, not another of these
        writes = [write for at, write in enumerate(writes) if not (write.brief and ids[at] in ids[:at])]
        self.last = epoch, number, writes
        self._commit(epoch, number, writes)

    @precondition(lambda self: self.last is not None)
    @rule()
    def repeat_the_last_commit(self) -> None:
        """Its answer was lost. Perhaps it was written, perhaps others came after it."""
        assert self.last is not None
        self._commit(*self.last)

    def _commit(self, epoch: int, number: int, writes: list[Write]) -> None:
        before = self.memory.requests
        try:
            self.both(lambda store: store.commit(epoch, number, writes))
        except (Fenced, LostWrites):
            assert self.memory.requests is before
        else:
            self.numbers[epoch] = number

    @rule(
        back=EPOCHS,
        part=st.sampled_from([None, -2, -3]),
        follows=st.sampled_from([0, 1, -2, -3]),
        moves=st.lists(MOVES, max_size=3, unique_by=lambda move: move[0]),
    )
    def rewrite(self, back: int, part: int | None, follows: int, moves: list[Any]) -> None:
        """The last part, or another one; after a part, or the last commit, or the one before it."""
        epoch = self.reign(back)
        last = self.numbers[epoch]
        writes = [self._whole(self.write(move)) for move in moves]
        after = follows if follows < 0 else max(0, last - follows)
        before = self.memory.requests
        try:
            self.both(lambda store: store.rewrite(epoch, last if part is None else part, after, writes))
        except (Fenced, LostWrites):
            assert self.memory.requests is before

    @staticmethod
    def _whole(write: Write) -> Write:
        log = encode(range(write.record.emitted), 4, 1) if write.record.emitted else b""
        submit = b"payload " + write.record.request.id.encode()
        return replace(write, submit=submit, start=0, log=log, brief=False)

    @rule(back=EPOCHS)
    def step_down(self, back: int) -> None:
        self.both(lambda store: store.step_down(self.reign(back)))

    @rule(back=EPOCHS, learned=st.binary(max_size=3))
    def learn(self, back: int, learned: bytes) -> None:
        try:
            self.both(lambda store: store.save_learned(self.reign(back), learned))
        except (Fenced, LostWrites):
            return

    @rule(back=EPOCHS, id=st.sampled_from(IDS))
    def set_aside(self, back: int, id: str) -> None:
        try:
            self.both(lambda store: store.set_aside(self.reign(back), id, "reason"))
        except (Fenced, LostWrites):
            return

    @rule(id=st.sampled_from(IDS))
    def lose_one_request(self, id: str) -> None:
        self.memory._requests = {key: stored for key, stored in self.memory.requests.items() if key != id}
        self.runner.run(self.raw.delete(self.redis.keys.request(id), self.redis.keys.log(id)))

    @rule()
    def let_time_pass(self) -> None:
        """What has ended expires; what has not, never."""

        async def expire() -> None:
            for id, stored in self.memory.requests.items():
                live = isinstance(stored, Stored) and stored.ending is None
                for key in (self.redis.keys.request(id), self.redis.keys.log(id)):
                    ttl = await self.raw.ttl(key)
                    assert ttl == -2 or (ttl == -1 if live else 0 < ttl <= KEEP_S), (id, ttl)
                    if ttl > 0:
                        await self.raw.delete(key)

        self.runner.run(expire())
        self.now += KEEP_S

    @rule()
    def back_up(self) -> None:
        async def dump() -> dict[bytes, tuple[bytes, int]]:
            return {key: (await self.raw.dump(key), max(0, await self.raw.pttl(key))) for key in await self._keys()}

        self.backup = copy.copy(self.memory), self.runner.run(dump())

    @precondition(lambda self: self.backup is not None)
    @rule()
    def go_back_to_the_backup(self) -> None:
        """A restart that lost what was written since."""
        assert self.backup is not None
        memory, dumped = self.backup

        async def restore() -> None:
            if keys := await self._keys():
                await self.raw.delete(*keys)
            for key, (value, ttl) in dumped.items():
                await self.raw.restore(key, ttl, value)

        self.memory = copy.copy(memory)
        self.memory._ends = dict.fromkeys(memory._ends, self.now + KEEP_S)
        self.runner.run(restore())

    @invariant()
    def hold_the_same(self) -> None:
        self.both(lambda store: store.pulse())
        self.both(lambda store: store.learned())
        held: list[Stored | Unreadable | None] = self.both(lambda store: store.read(IDS))
        there = [id for id, stored in zip(IDS, held, strict=True) if stored]
        self.both(lambda store: _index(store, there))
        for stored in held:
            if not isinstance(stored, Stored):
                continue
            rounds = list(decode(stored.log))
            assert [token for round in rounds for token in round.tokens] == list(range(stored.record.emitted))


async def _index(store: Store, there: list[str]) -> list[list[str]]:
    """Of the requests that are there: Redis goes on naming one whose key somebody deleted."""
    return [[id for id in ids if id in there] for ids in await store.index()]


async def _outcome(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except (Fenced, LostWrites) as error:
        return error


def _comparable(answer: Any) -> Any:
    return type(answer) if isinstance(answer, Exception) else answer


def replace_pulse(pulse: Pulse, ago: int) -> Pulse:
    """As it was before: `ago` commits, or another epoch's."""
    return pulse if not ago else Pulse(pulse.epoch, ago + (pulse.commit or 0))


def test_redis_and_its_twin_are_alike(redis_url: str) -> None:
    machine = type("Machine", (Twins,), {"url": redis_url})
    chosen = settings(
        max_examples=int(os.environ.get("EXAMPLES", "40")),
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=chosen)
