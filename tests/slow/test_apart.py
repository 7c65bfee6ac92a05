"""A drafter in a process of its own under a whole stack: killed, stopped, restarted; its links cut, delayed, throttled
and held; its messages false, lost, repeated and out of order. Every stream is checked. Prints its record. And how far
away it may be, on a live link."""

import asyncio
import json
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from laps_sd.supervise import Command
from scheduler_service.sim.costs import StepCosts
from tests.chaos.__main__ import OPTIONS, RECOVER_S, TINY_TEXTS
from tests.chaos.book import Book
from tests.chaos.cluster import Cluster, Drafter, cluster
from tests.chaos.faults import OF_DRAFTER, schedule
from tests.chaos.leftovers import leftovers
from tests.chaos.load import Load, Tally
from tests.chaos.strikes import Striker
from tests.tiny_model import make_tiny_model
from tests.waiting import until
from tests.worker.apart import DISORDERS, LIES
from tests.worker.apart_points import Point, measured, say, slow_engine
from worker_service.engine.types import Sampling

pytestmark = pytest.mark.timeout(3600)

FAULTS, STREAMS = int(os.environ.get("FAULTS", "300")), int(os.environ.get("STREAMS", "1000"))
USERS = 16
# A tiny model's pass is over before a message gets anywhere: its workers are as slow as a device of some use.
PACE = {
    "draft_s": 0.0,
    "verify_s": 0.02,
    "verify_slope_s": 0.001,
    "prefill_token_s": 0.0001,
    "verify_token_s": 0.0005,
}
# A tiny model's likeliest text repeats itself, and a lookup is asked before the drafter: it finds nothing in texts of a
# high temperature.
SAMPLINGS = (Sampling(), *(Sampling(temperature=1.5, seed=seed) for seed in (7, 8, 2**64 - 1)))
SETTLED = 2000  # drafts that are verified before anything is disturbed
LEAST_SHARE = 0.3
END_S = 3000.0


def command(settings: dict[str, object], port: int) -> Command:
    arguments = [sys.executable, "-m", "tests.worker.apart", json.dumps({**settings, "port": port})]
    return Command("drafter-0", arguments, up=b"127.0.0.1:")


async def figures(made: Cluster) -> Counter[str]:
    """The metrics of all workers: counts add up, of the longest wait the longest stays."""
    counted = Counter[str]()
    async with httpx2.AsyncClient(timeout=10.0) as client:
        for port in made.metrics:
            answer = await client.get(f"http://127.0.0.1:{port}/metrics")
            for family in text_string_to_metric_families(answer.text):
                for sample in family.samples:
                    name = sample.name.removeprefix("laps_sd_")
                    if "longest" in name:
                        counted[name] = max(counted[name], sample.value)
                    elif name != "step_seconds_total" or sample.labels["phase"] != "idle":
                        counted[name] += sample.value
    return counted


async def drafts(made: Cluster) -> tuple[float, float]:
    """All that were verified, and those of them that the drafter in another process made."""
    counted = await figures(made)
    return (
        counted["spec_decode_num_draft_tokens_total"],
        counted["spec_decode_num_remote_draft_tokens_total"],
    )


async def disturbed(made: Cluster, load: Load, striker: Striker, struck: Counter[str]) -> float:
    """All faults under load, and as many streams as there must be. Returns the remote share of drafts before."""
    running = asyncio.create_task(load.run(USERS))
    try:
        async with asyncio.timeout(END_S):
            await load.flows(RECOVER_S)

            async def there() -> bool:
                return (await drafts(made))[1] > 0

            await until(there, END_S)
            first = await drafts(made)

            async def settled() -> bool:
                return (await drafts(made))[0] > first[0] + SETTLED

            await until(settled, END_S)
            verified, remote = (now - before for now, before in zip(await drafts(made), first, strict=True))

            async def enough() -> bool:
                return sum(load.tally.streams.values()) >= STREAMS

            await striker.run(schedule(1, FAULTS, OF_DRAFTER), lambda: load.flows(RECOVER_S))
            await until(enough, END_S)
            load.end()
            await running
        return remote / verified
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_whatever_happens_to_the_drafter_no_token_is_lost_repeated_or_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAPS_SD_WORKER_PACE", json.dumps(PACE))
    began = time.monotonic()
    model = make_tiny_model(tmp_path / "tiny")
    book = Book(model, **TINY_TEXTS, samplings=SAMPLINGS)
    texts, mode, log = tmp_path / "texts.json", tmp_path / "mode", tmp_path / "log"
    texts.write_text(json.dumps([[*book.ids(text), *text.tokens] for text in book.texts]))
    mode.write_text("")
    drafter = Drafter(
        partial(command, {"texts": str(texts), "mode_file": str(mode), "ids": book.vocab_size}), mode, LIES + DISORDERS
    )
    tally, struck = Tally(), Counter[str]()
    with log.open("wb", buffering=0) as lines:
        async with cluster(model, lines, options=replace(OPTIONS, drafter="none"), drafter=drafter) as made:
            load = Load(book, made.client, 1, tally)
            share = await disturbed(made, load, Striker(made, struck, lines), struck)
            left, counted = await leftovers(made), await figures(made)
    record = {
        "faults": dict(sorted(struck.items())),
        "streams": dict(sorted(tally.streams.items())),
        "tokens": tally.tokens,
        "errors": dict(sorted(tally.errors.items())),
        **tally.longest(),
        "mean_step_ms": round(1e3 * counted["step_seconds_total"] / counted["steps_total"], 1),
        "longest_wait_of_a_step_ms": round(1e3 * counted["step_longest_wait_seconds"], 1),
        "longest_step_with_its_wait_in_mean_steps": round(
            1 + counted["step_longest_wait_seconds"] * counted["steps_total"] / counted["step_seconds_total"], 2
        ),
        "remote_share_before": round(share, 3),
        "violations": tally.violations + left,
        "duration_s": round(time.monotonic() - began),
    }
    sys.stdout.write(json.dumps(record) + "\n")
    assert record["violations"] == []
    assert sum(struck.values()) == FAULTS
    assert sum(tally.streams.values()) >= STREAMS
    assert share >= LEAST_SHARE


def test_the_further_away_a_drafter_is_the_fewer_rounds_have_its_drafts_and_none_waits_in_vain() -> None:
    """Passes of 60 ms; texts are compared with those of plain decoding. Prints the simulator's figures beside."""
    costs, found = StepCosts(0.0, 60.0, 0.02, 0.1, 0.0), []
    with slow_engine(costs) as engine:
        for rtt_ms in (0.0, 5.0, 20.0, 30.0, 50.0):
            found.append(measured(engine, Point("guesses", 1, rtt_ms), costs, 60, 1))
            say(found)
    assert found[0]["drafted"] >= LEAST_SHARE
    assert found[-1]["drafted"] < found[0]["drafted"]
    assert found[-1]["waited"] < 0.1  # by then it works with what is there
