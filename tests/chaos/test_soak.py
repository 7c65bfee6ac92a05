"""What the soak says of curves."""

import os

import psutil
import pytest

from tests.chaos.soak import FILES, RSS, Curves


def test_growth_is_from_after_the_warm_up_to_the_end() -> None:
    samples = [10.0, 60.0, *[100.0] * 10, *[104.0] * 10]
    curves = Curves(1.0, begins=2, of={"worker": {RSS: samples, FILES: [7] * 22}})
    assert curves.growth("worker", RSS) == pytest.approx(0.04)
    assert curves.growth("worker", FILES) == 0


def test_a_process_that_comes_later_is_measured_from_then_on() -> None:
    curves = Curves(1.0, begins=0)
    own = psutil.Process(os.getpid())
    curves.sample({})
    curves.sample({"late": own})
    assert curves.of["late"][RSS][0] is None
    assert curves.of["late"][RSS][1] > 1
    assert curves.growth("late", RSS) == 0
    curves.sample({})
    assert curves.of["late"][FILES][2] is None
