"""The server's own figures during a load test."""

import itertools
from typing import Any

import pytest

from laps_sd.client import RequestError
from laps_sd.loadtest import timeline as module
from laps_sd.loadtest.timeline import Timeline
from protos.errors import DeadlinePassed, Forbidden, NotServing
from protos.v1 import status_pb2


class Ended(Exception):
    """Nothing is left of the script."""


class Scripted:
    """In place of a client: answers or errors in turn."""

    def __init__(self, *script: status_pb2.StatsResponse | RequestError) -> None:
        self._script = iter(script)

    async def stats(self) -> Any:
        step = next(self._script, None)
        if step is None:
            raise Ended
        if isinstance(step, RequestError):
            raise step
        return step


STATS = status_pb2.StatsResponse()


async def watched(*script: status_pb2.StatsResponse | RequestError) -> Timeline:
    timeline = Timeline()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "EVERY_S", 0.0)
        try:
            await timeline.watch(Scripted(*script), itertools.count().__next__)  # type: ignore[arg-type]
        except Ended:
            timeline.samples.append({"ended": True})
    return timeline


@pytest.mark.parametrize("error", [NotServing("away"), DeadlinePassed("late")])
async def test_a_server_that_cannot_answer_for_a_while_is_asked_again(error: RequestError) -> None:
    timeline = await watched(STATS, error, STATS)
    assert len(timeline.samples) == 3
    assert not timeline.missing


async def test_a_server_that_refuses_is_not_asked_again() -> None:
    timeline = await watched(Forbidden("not yours"), STATS)
    assert not timeline.samples
    assert timeline.missing == "PERMISSION_DENIED: not yours"


async def test_why_the_last_figures_are_missing_is_told() -> None:
    assert (await watched(STATS, NotServing("away"))).missing == "UNAVAILABLE: away"
