"""What a simulated service gets in place of the world outside: channels, servers, the store, signals, clocks, words."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import lru_cache, partial
from typing import Any
from unittest import mock

import gateway.config
import scheduler_service.__main__ as scheduler
from gateway.text import TextModel
from protos.link.v1 import common_pb2 as common_pb
from protos.models import digest
from scheduler_service.config import Settings
from scheduler_service.leader import Leader
from scheduler_service.outbox import GatewayOutbox
from tests.scheduler.faults.ends import Channel, SimServer, current
from tests.scheduler.faults.loop import PROCESS
from tests.scheduler.faults.storage import StorePort

EPOCH_S = 1_700_000_000.0  # when a schedule begins, on the wall


@lru_cache(maxsize=1)
def settings() -> tuple[Settings, gateway.config.Settings]:
    """Made once: pydantic takes longer to read settings than a schedule may last."""
    scheduling = Settings(_cli_parse_args=False, predictor="none", worker_timeout_s=3.0)  # type: ignore[call-arg, arg-type]
    return scheduling, gateway.config.Settings(_cli_parse_args=False, http_port=0)  # type: ignore[call-arg]


class _Words:
    """A tokenizer whose words are numbers."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"{id} " for id in ids)


class _Text(TextModel):
    def __init__(self, info: common_pb.ModelInfo) -> None:
        self.info, self.digest = info, digest(info)
        self.name, self.fingerprint = info.name, info.fingerprint
        self.context_tokens, self.vocab_size = info.context_tokens, info.vocab_size
        self.refused: dict[str, str] = {}
        self._bytes, self._special = None, frozenset[int]()
        self._tokenizer = _Words()

    def encode_prompt(self, prompt: str, *, special: bool = True) -> list[int]:
        return [int(word) for word in prompt.split()]


class _NoHttp:
    """In place of an HTTP port: nobody asks there."""

    port = 0

    def __init__(self, *_: object, **__: object) -> None:
        pass

    async def start(self) -> None: ...

    async def stop(self, grace_s: float) -> None: ...


def _world() -> Any:
    return current().world


def _server(*_: object, **__: object) -> SimServer:
    return SimServer(_world().network, current())


def _dial(address: str, *_: object) -> Channel:
    return Channel(_world().network, current(), address)


@asynccontextmanager
async def _signals() -> AsyncIterator[asyncio.Event]:
    yield current().stopping


def _wall() -> float:
    process = PROCESS.get()
    return _time() if process is None else EPOCH_S + process.loop.now + process.skew_s


def _monotonic() -> float:
    process = PROCESS.get()
    return _real_monotonic() if process is None else process.loop.now


def _perf_counter() -> float:
    """The search for reference cycles paces itself by it."""
    process = PROCESS.get()
    return _real_perf_counter() if process is None else process.loop.now


_time, _real_monotonic, _real_perf_counter = time.time, time.monotonic, time.perf_counter


class _SimLeaderSlot(scheduler.LeaderSlot):
    def __init__(self, _: object) -> None:
        super().__init__()
        _world().slots[current().name] = self


class _NumberedOutbox(GatewayOutbox):
    """Whose place in a set does not depend on its address."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        world = _world()
        world.outboxes += 1
        self._number = world.outboxes

    def __hash__(self) -> int:
        return self._number


@contextmanager
def simulated() -> Iterator[None]:
    """Whatever would reach outside reaches the world of the process that does it."""
    instead: dict[str, Any] = {
        "worker_service.link.channel": _dial,
        "gateway.connection.channel": _dial,
        "gateway.link.TextModel": _Text,
        "gateway.app.make_server": _server,
        "gateway.app.HttpServer": _NoHttp,
        "scheduler_service.__main__.make_server": _server,
        "scheduler_service.__main__.stop_signals": _signals,
        "scheduler_service.__main__.RedisStore": lambda *_, **__: StorePort(_world().storage),
        "scheduler_service.__main__.Leader": partial(Leader, clock=_wall),
        "scheduler_service.__main__.LeaderSlot": _SimLeaderSlot,
        "scheduler_service.links.gateways.GatewayOutbox": _NumberedOutbox,
        "time.time": _wall,
        "time.monotonic": _monotonic,
        "time.perf_counter": _perf_counter,
    }
    with ExitStack() as stack:
        for name, value in instead.items():
            stack.enter_context(mock.patch(name, value))
        yield
