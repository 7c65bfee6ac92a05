"""A pair of schedulers is upgraded one by one, and goes back, under streams. The newer code is a copy of this one whose
stored requests have a raised version and one more field."""

import shutil
from pathlib import Path

import pytest
import redis

from scheduler_service.store.fields import MAJOR, MINOR
from scheduler_service.store.redis import Keys
from tests.scheduler.pair import ROOT, SchedulerProcess
from tests.scheduler.takeover import SLOTS, Bench, Listener, benched, submission
from tests.waiting import until

pytestmark = pytest.mark.timeout(180)

WAITING = 20
NEWER = f"{MAJOR}.{MINOR + 1}".encode()
PATCHES = {
    "store/fields.py": [
        (f"MAJOR, MINOR = {MAJOR}, {MINOR}\n", f"MAJOR, MINOR = {MAJOR}, {MINOR + 1}\n"),
        ("RECORD = Table(\n", 'RECORD = Table(\n    Field("shade", "shade", int, int, 7),\n'),
    ],
    "core/types.py": [("    deaths: int = 0", "    shade: int = 7\n    deaths: int = 0")],
}


@pytest.fixture
def newer_code(tmp_path: Path) -> Path:
    package = tmp_path / "scheduler_service"
    shutil.copytree(ROOT / "scheduler_service", package, ignore=shutil.ignore_patterns("__pycache__"))
    for file, patches in PATCHES.items():
        text = (package / file).read_text()
        for old, new in patches:
            assert text.count(old) == 1, f"{file} has changed: mend PATCHES"
            text = text.replace(old, new)
        (package / file).write_text(text)
    return tmp_path


async def restarted(scheduler: SchedulerProcess, code: Path) -> None:
    await scheduler.stop()
    scheduler.code = code
    await scheduler.start()


async def goes_on(bench: Bench, listeners: list[Listener], leader: SchedulerProcess, waiting: int = WAITING) -> None:
    """It leads, every stream gets more tokens from it, and it knows all that wait. Listeners check every token."""
    await until(leader.leads)
    before = [listener.tokens for listener in listeners]

    async def all_there() -> bool:
        more = all(listener.tokens > tokens + 5 for listener, tokens in zip(listeners, before, strict=True))
        return more and await bench.waiting() == waiting

    await until(all_there)


async def test_a_pair_is_upgraded_and_goes_back_under_streams(redis_url: str, namespace: str, newer_code: Path) -> None:
    with redis.Redis.from_url(redis_url) as raw:
        async with benched(redis_url, namespace, 1) as bench:
            first, second = bench.schedulers
            listeners = await bench.submit(WAITING, prompt=8)
            bench.run(*listeners)
            await goes_on(bench, listeners, first)
            await restarted(second, newer_code)
            await first.stop()
            await goes_on(bench, listeners, second)  # newer code on what older code has stored
            first.code = newer_code
            await first.start()
            new = submission(SLOTS + WAITING, prompt=8)
            await bench.links[0].submit(new).until_accepted()
            written = Keys(namespace).request(new.request_id)
            assert raw.hmget(written, "v", "shade") == [NEWER, b"7"]
            await restarted(first, ROOT)
            await second.kill()
            await goes_on(bench, listeners, first, WAITING + 1)  # older code on what newer code has stored
            assert raw.hget(written, "shade") == b"7"
        assert not raw.exists(Keys(namespace).all_unreadable)
