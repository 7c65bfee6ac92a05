"""An event loop whose clock moves only when nothing else can happen, and a server that is scripted under it."""

import asyncio
import selectors
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar

from laps_sd.loadtest.driver import drive
from laps_sd.loadtest.plan import Planned
from laps_sd.loadtest.record import Record, Tally
from laps_sd.loadtest.target import Clock, Refused, Server, Target

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(None if timeout is None else 0)
        if not ready:
            self.now += timeout or 0.0
        return ready


class MovedClock(asyncio.SelectorEventLoop):
    """An hour of its time takes no time."""

    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=MovedClock) as runner:
        return runner.run(work)


def hold_up(seconds: float) -> None:
    """As if the driver's process did nothing for so long."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, MovedClock)
    loop.selector.now += seconds


class Scripted(Target):
    """Answers request i after the pauses, each before an output of some tokens, of `script[i]`, or of `script[-1]`.

    `held_up_s`: how long making each request keeps the driver busy; `refuses`: the words for a request by index.
    """

    def __init__(
        self,
        *script: Sequence[tuple[float, int]],
        held_up_s: float = 0.0,
        refuses: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(Server(at="nowhere"))
        self.script, self.held_up_s, self.refuses = script, held_up_s, refuses or {}
        self.live = self.most_live = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def ready(self) -> None: ...

    def prepare(self, planned: Planned) -> Planned:
        return planned

    async def answer(self, request: Planned, record: Record, clock: Clock) -> None:
        hold_up(self.held_up_s)
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        for pause_s, tokens in self.script[min(request.index, len(self.script) - 1)]:
            await asyncio.sleep(pause_s)
            record.outputs.append((clock(), tokens))
            record.output_tokens += tokens
        self.live -= 1
        if request.index in self.refuses:
            raise Refused(self.refuses[request.index])
        record.input_tokens = 10


def planned(*due_s: float | None, warmup: int = 0) -> list[Planned]:
    return [Planned(i, due, "text", 10, 8, False, measured=i >= warmup) for i, due in enumerate(due_s)]


def records_of(
    plan: Sequence[Planned], target: Target, concurrency: int | None = None, start: float = 0.0
) -> list[Record]:
    return run(drive(plan, target, start=start, tally=Tally(), concurrency=concurrency))
