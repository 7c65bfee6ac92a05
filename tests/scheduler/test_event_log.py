"""The log of events is written beside the event loop: nobody waits for a slow disk before too much waits for it, and
one that fails ends the log and not the service."""

import asyncio
import os
import threading
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from protos.link.v1 import gateway_link_pb2 as pb
from scheduler_service.config import Settings
from scheduler_service.core.core import Core
from scheduler_service.core.events import Cancelled
from scheduler_service.core.lifecycle import State
from scheduler_service.core.policies import make_policy
from scheduler_service.event_log import MOST_WAITING, EventLog, replay
from scheduler_service.leader import Leader
from scheduler_service.store import MemoryStore, StoreUnavailable, Write
from tests.scheduler.live import hello
from tests.scheduler.store.writes import Reign, record

FULL = Path("/dev/full")  # a file that cannot be written
PIPE_BYTES = 1 << 16  # that a pipe holds at most, on Linux


def log_events(log: EventLog, count: int) -> None:
    for number in range(count):
        log.event(float(number), Cancelled("a"))


def test_a_disk_that_stands_still_holds_up_nobody_and_gets_every_line_in_order(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "events.jsonl")
    disk = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    log = EventLog(path)
    assert MOST_WAITING * len(b'{"now":0.0,"kind":"Cancelled","event":{"id":"a"}}\n') > 2 * PIPE_BYTES
    log_events(log, MOST_WAITING)  # returns, though nothing is read
    os.set_blocking(disk.fileno(), True)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.extend(disk))
    reader.start()
    log.close()
    reader.join()
    disk.close()
    assert [float(line.split(b",")[0].split(b":")[1]) for line in read] == list(range(MOST_WAITING))


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
def test_a_full_disk_ends_the_log_and_nobody_waits_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(FULL)
    log_events(log, 3 * MOST_WAITING)
    log.close()
    assert "No space left" in capsys.readouterr().out


def test_an_event_that_cannot_be_put_into_words_ends_the_log_and_nobody_waits_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.event(0.0, Cancelled(object()))  # type: ignore[arg-type]
    log_events(log, 3 * MOST_WAITING)
    log.close()
    assert "event_log_ended" in capsys.readouterr().out


def test_a_disk_that_hangs_for_ever_ends_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("STALLED_S", "CLOSE_S"):
        monkeypatch.setattr(f"scheduler_service.event_log.{name}", 0.0)
    os.mkfifo(path := tmp_path / "events.jsonl")
    disk = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # nothing is ever read
    log = EventLog(path)
    log_events(log, 3 * MOST_WAITING)
    log.close()
    os.close(disk)
    assert "event_log_ended" in capsys.readouterr().out


async def test_a_log_is_replayed_though_taking_over_was_tried_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (terms := tmp_path / "tenants").write_text("* requests=9\n")
    store, submit = MemoryStore(), pb.Submit(request_id="a", prompt=[1] * 4)
    reign = Reign(store, await store.lead(1))
    await reign.commit(Write(record("a", state=State.RUNNING), submit=submit.SerializeToString()))
    settings = Settings(_cli_parse_args=False, event_log=(log := tmp_path / "events.jsonl"), tenants=terms)  # type: ignore[call-arg]
    leader = Leader(settings, store)
    monkeypatch.setattr(leader, "_acknowledged", AsyncMock(side_effect=[StoreUnavailable("away"), None]))
    with pytest.raises(StoreUnavailable):
        await leader.lead()
    await leader.lead()
    leader.workers.command(await leader.attach(hello()))
    leader.persisting.cancel()
    await asyncio.gather(leader.persisting, return_exceptions=True)
    await leader.close()
    cores = [Core(make_policy("default")) for _ in range(3)]
    ((_, logged, rebuilt),) = replay(log, iter(cores).__next__)
    assert [run.id for run in logged.schedule] == ["a"]
    assert rebuilt == logged
    assert cores[-1].fleet.tenants.terms == leader.core.fleet.tenants.terms != {}
