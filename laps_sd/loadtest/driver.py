"""Sends requests at their times and notes their answers. An arrival never waits for an answer.

Time is the event loop's, so that tests can use a loop with a clock of their own.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from laps_sd.loadtest.plan import Planned
from laps_sd.loadtest.record import Record, Tally
from laps_sd.loadtest.target import Refused, Target


async def drive(
    plan: Sequence[Planned], target: Target, *, start: float, tally: Tally, concurrency: int | None = None
) -> list[Record]:
    """The records of all requests, in the order of `plan`.

    `start`: the time of the loop's clock that due times count from, and before which nothing is sent. `tally` is
    updated as answers end. `concurrency`: at most so many requests are in flight. A request with a due time then waits
    until one of them ends, and the wait counts as latency. A request without a due time arrives when one of them ends.
    """
    loop = asyncio.get_running_loop()
    cap = asyncio.Semaphore(concurrency) if concurrency else None
    records: list[Record] = []

    def clock() -> float:
        return loop.time() - start

    async def one(request: Any, record: Record, waits: bool) -> None:
        async with AsyncExitStack() as place:
            if cap is not None:
                if waits and cap.locked():
                    await cap.acquire()
                    record.free_s = clock()
                elif waits:
                    await cap.acquire()
                place.callback(cap.release)
            record.sent_s = clock()
            tally.sent += 1
            try:
                await target.answer(request, record, clock)
            except Refused as refusal:
                record.error = str(refusal)
            record.end_s = clock()
            tally.ended(record)

    await asyncio.sleep(max(0.0, -clock()))
    async with asyncio.TaskGroup() as tasks:
        for planned in plan:
            request = target.prepare(planned)
            if planned.due_s is not None:
                await asyncio.sleep(max(0.0, planned.due_s - clock()))
            elif cap is not None:
                await cap.acquire()
            due_s = clock() if planned.due_s is None else planned.due_s
            records.append(record := Record(planned.index, due_s, due_s, planned.category, planned.measured))
            tasks.create_task(one(request, record, waits=planned.due_s is not None))
    return records
