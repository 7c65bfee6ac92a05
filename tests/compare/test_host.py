"""What else went on during a run."""

import asyncio
import time

import pytest

from laps_sd.compare import host
from laps_sd.compare.host import Conditions, watched


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        (Conditions(0.5, 0.0, 0.0), "the hypervisor took 50%"),
        (Conditions(0.0, 0.2, 0.0), "other processes used 20%"),
        (Conditions(0.0, 0.0, 3.0), "stood still for 3.0 s"),
    ],
)
def test_a_disturbed_machine_is_told(conditions: Conditions, words: str) -> None:
    (fault,) = conditions.faults()
    assert words in fault


def test_a_quiet_machine_is_no_fault() -> None:
    assert not list(Conditions(0.001, 0.02, 0.1).faults())
    assert not list(Conditions().faults())


async def test_a_standstill_is_noticed() -> None:
    async with watched() as conditions:
        await asyncio.sleep(0)  # its clock starts
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            pass
    assert conditions.stall_s > 0.2


async def test_work_of_ours_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the machine did is what we did."""
    ours = iter([1.0, 5.0])
    monkeypatch.setattr(host, "_ours_s", lambda: next(ours))
    whole = iter([(10.0, 0.0), (14.0, 0.0)])
    monkeypatch.setattr(host, "_processors", lambda: next(whole))
    async with watched() as conditions:
        pass
    assert conditions.others_share == 0.0


def test_our_own_processor_time_is_counted() -> None:
    before = host._ours_s()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert host._ours_s() - before >= 0.1
