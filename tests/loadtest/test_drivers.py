"""Shares of a load, and what becomes of driver processes that fail."""

import os

import pytest

from laps_sd.loadtest.drivers import DriverFailed, Process, run, shares
from laps_sd.loadtest.target import Refused, Server
from tests.loadtest.moved import planned
from tests.loadtest.sse import DONE, Answers, serving, text


def test_requests_and_the_cap_are_dealt_out_in_turn() -> None:
    plan = planned(0, 1, 2, 3, 4)
    dealt = shares(plan, concurrency=5, drivers=2)
    assert [([request.index for request in share], cap) for share, cap in dealt] == [([0, 2, 4], 3), ([1, 3], 2)]
    assert [cap for _, cap in shares(plan, concurrency=None, drivers=2)] == [None, None]


async def test_processes_drive_what_one_would() -> None:
    answers = Answers([text("a", "length"), DONE])
    async with serving(answers) as url:
        records, _ = await run(Server(at=url, model="tiny"), planned(0, 0, 0), drivers=2)
    assert [(record.index, record.completed, record.output_tokens) for record in records] == [
        (0, True, 1),
        (1, True, 1),
        (2, True, 1),
    ]


async def test_what_a_process_is_refused_is_said_here() -> None:
    async with serving(Answers()) as url:
        with pytest.raises(Refused, match="NOT_FOUND: model 'other'"):
            await run(Server(at=url, model="other"), planned(0, 0), drivers=2)


async def test_a_process_that_dies_is_an_error_and_not_a_smaller_load() -> None:
    async with serving(Answers()) as url, Process(Server(at=url, model="tiny"), planned(0), None) as driver:
        await driver.ready()
        driver._process.kill()
        with pytest.raises(DriverFailed):
            await driver.run(start=0.0)


async def test_ctrl_c_on_the_terminal_reaches_no_driver_process() -> None:
    async with Process(Server(at="http://h", model="tiny"), planned(0), None) as driver:
        assert os.getpgid(driver._process.pid) != os.getpgid(0)
