"""`laps-sd top`: what a frame tells, and that it is told to people and to programs."""

import asyncio
import json
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from laps_sd.client import AsyncClient, NotServing, RequestPage, RequestStatus, Stats, Worker
from laps_sd.tables import Bar, Column, FittedTable
from laps_sd.top import frames
from laps_sd.top_frame import Frame
from laps_sd.top_view import view
from tests.gateway.harness import stack

RUN_S = 60.0


def stats(**fields: Any) -> Stats:
    return Stats(policy="laps-sd", model="tiny", **fields)


def worker(**fields: Any) -> Worker:
    return Worker(worker_id="w", slots=4, running=3, blocks=100, free_blocks=75, **fields)


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def text(frame: Frame | NotServing, width: int = 120) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(view(frame))
    return captured.get()


def test_rates_are_per_second_since_the_frame_before() -> None:
    before = stats(finished=10, workers=[worker(output_tokens=100)])
    frame = Frame(stats(finished=16, workers=[worker(output_tokens=500)]), before, seconds=2.0)
    assert frame.rate("finished") == 3
    assert frame.rate("output_tokens", "w") == 200


def test_no_rate_is_made_up() -> None:
    assert Frame(stats(finished=10)).rate("finished") is None
    started_anew = Frame(stats(finished=1), stats(finished=10), seconds=1.0)
    assert started_anew.rate("finished") is None
    new_worker = Frame(stats(workers=[worker()]), stats(), seconds=1.0)
    assert new_worker.rate("rounds", "w") is None


def test_acceptance_is_that_of_late() -> None:
    before = stats(num_draft_tokens=100, num_accepted_tokens=90)
    assert Frame(stats(num_draft_tokens=200, num_accepted_tokens=110), before, 1.0).acceptance == 0.2
    assert Frame(before, before, 1.0).acceptance == 0.9
    assert Frame(stats()).acceptance is None


def test_a_worker_that_is_coming_and_one_that_is_going_are_told_apart() -> None:
    shown = text(Frame(stats(workers=[worker(draining=True)], loading_workers=["new"])))
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line}
    assert (rows["w"][1], rows["new"][1]) == ("draining", "loading")


def test_people_see_queues_workers_and_requests() -> None:
    live = RequestStatus(
        request_id="[red]a", state="paused", queue_level=2, output_tokens=5, predicted_tokens=20,
        rounds=3, acceptance_rate=0.5, estimated_end_time=at(107.5), preemptions=4, worker_id="w",
    )  # fmt: skip
    listed = RequestPage(requests=[live], read_time=at(100.0))
    shown = text(Frame(stats(queue_lengths=[0, 7, 0], workers=[worker()], waiting=6), listed=listed))
    assert "6 waiting" in shown
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line}
    assert rows["2"][1] == "7"
    assert "3" not in rows
    assert rows["w"][1:5] == ["serves", "3/4", "0", "25%"]
    assert [word for word in rows["[red]a"] if word.isascii()] == [
        "[red]a",
        "paused",
        "2",
        "5/20",
        "50%",
        "7.5",
        "4",
        "w",
    ]


def busy(request: str = "0123456789abcdef") -> Frame:
    live = RequestStatus(
        request_id=request, state="running", queue_level=3, output_tokens=1234,
        predicted_tokens=2048, rounds=3, acceptance_rate=0.87, estimated_end_time=at(1234.5), preemptions=17,
        worker_id="worker-0",
    )  # fmt: skip
    served = worker(rounds=90_000, output_tokens=190_000, idle_share=0.12, outside_forward_share=0.34, placed=29)
    before = stats(workers=[worker()])
    now = stats(queue_lengths=[70, 3], workers=[served], waiting=66, running=4, submitted=12_345)
    return Frame(now, before, 10.0, RequestPage(requests=[live] * 2, read_time=at(0.0)))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_number_is_cut_however_narrow_the_terminal(width: int) -> None:
    shown = text(busy(), width)
    assert all(len(line) <= width for line in shown.splitlines())
    assert "…" not in shown
    for number in ("3/4", "25%", "19,000.0", "1234/2048", "1,234.5", "70"):
        assert number in shown.split()


def test_a_wide_terminal_shows_every_column_and_a_narrow_one_the_important_ones() -> None:
    def titles(width: int) -> list[str]:
        return next(line for line in text(busy(), width).splitlines() if line.startswith("request ")).split()

    assert titles(120) == ["request", "state", "level", "output", "accepted", "remaining", "s", "preempted", "worker"]
    assert titles(80) == ["request", "state", "level", "output", "accepted", "remaining", "s", "preempted"]
    assert titles(60) == ["request", "state", "level", "output", "remaining", "s"]


def test_bars_shrink_before_columns_go() -> None:
    table = FittedTable(
        [Column("name"), Column("", rank=1, bar=30), Column("share", rank=2)], [("abcdef", Bar(1, 2), "50%")]
    )
    assert table.widths(60) == {0: 6, 1: 30, 2: 5}
    assert table.widths(30) == {0: 6, 1: 15, 2: 5}
    assert table.widths(20) == {0: 6, 1: 12}


def test_a_program_sees_numbers_also_where_they_are_zero() -> None:
    seen = json.loads(json.dumps(Frame(stats(output_tokens=5, workers=[worker()])).as_dict()))
    assert (seen["output_tokens"], seen["waiting"], seen["workers"][0]["free_blocks"]) == (5, 0, 75)
    assert seen["rates"]["finished"] is None


async def test_a_server_that_comes_back_is_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [stats(finished=1), NotServing("away"), stats(finished=5), stats(finished=6)]

    async def answer(_: AsyncClient) -> Stats:
        if isinstance(said := answers.pop(0), Exception):
            raise said
        return said

    monkeypatch.setattr(AsyncClient, "stats", answer)
    seen = frames(AsyncClient("127.0.0.1:1"), every_s=0.0, requests=0)
    first, away, back, again = [await anext(seen) for _ in range(4)]
    assert isinstance(away, NotServing)
    assert "away" in text(away)
    assert [frame.before is None for frame in (first, back, again)] == [True, True, False]


async def top(*words: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "laps_sd.cli", "top", "--every-s", "0.05", *words]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=RUN_S)
    return ran.returncode, ran.stdout, ran.stderr


async def test_one_frame_of_a_running_service() -> None:
    async with stack() as (_, _, client):
        code, out, err = await top("--server", client.target, "--once", "--json")
        assert code == 0, err
        assert json.loads(out)["waiting"] == 3
        code, out, _ = await top("--server", client.target, "--once")
        assert (code, "3 waiting" in out) == (0, True)


async def test_no_service_is_one_clear_line() -> None:
    code, _, err = await top("--server", "127.0.0.1:1", "--once")
    assert code == 1
    assert err.startswith("laps-sd: UNAVAILABLE: ")
    assert err.count("\n") == 1
