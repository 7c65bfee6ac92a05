"""What the core decides stays what it is, to the digit: plans, effects, estimates and results of seeded scenarios.

The digests were made by `python -m tests.scheduler.golden`. A change of decisions that is meant makes them anew, and
its commit says which decisions change and why. `python -m tests.scheduler.golden --lines NAME` shows all of one
scenario.
"""

import json

import pytest

from tests.scheduler.golden.scenarios import NAMES, PATH, digest

DIGESTS = json.loads(PATH.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_decisions_are_what_they_were(name: str) -> None:
    assert digest(name) == DIGESTS[name]


def test_no_scenario_is_left_without_a_digest() -> None:
    assert list(DIGESTS) == NAMES
