"""Nothing that listens is no reason to wait for long."""

import asyncio

import pytest
from typer.testing import CliRunner

from laps_sd import reach
from laps_sd.cli import app
from laps_sd.client import NotServing
from laps_sd.ports import claim_ports

WAIT_S = 60.0


async def test_a_server_that_listens_is_reached_and_one_that_comes_in_time_as_well() -> None:
    (port,) = claim_ports(0)
    waiting = asyncio.create_task(reach.listens(f"127.0.0.1:{port}", None, None, WAIT_S))
    await asyncio.sleep(0)
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
    await asyncio.wait_for(waiting, WAIT_S)
    server.close()


async def test_nothing_that_listens_is_told_with_its_cause() -> None:
    (port,) = claim_ports(0)
    with pytest.raises(NotServing, match=f"nothing listens at 127.0.0.1:{port}: is `laps-sd up` running there"):
        await reach.listens(f"127.0.0.1:{port}", None, None, 0.0)


def test_a_detached_request_waits_for_no_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laps_sd.answer.LISTENS_S", 0.0)
    (port,) = claim_ports(0)
    result = CliRunner().invoke(app, ["generate", "--detach", "hi", "--server", f"127.0.0.1:{port}"])
    assert result.exit_code == 1
    assert f"nothing listens at 127.0.0.1:{port}" in result.stderr
