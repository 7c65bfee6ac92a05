"""A sample of `make fuzz`: some inputs to every RPC of a real stack, and to a worker and a gateway from an impostor."""

from random import Random

import pytest

from protos.v1 import inference_pb2
from tests.fuzz.__main__ import fuzz
from tests.fuzz.doors import STRANGERS, peers
from tests.fuzz.fuzzing import COMPLAINTS, Watch
from tests.fuzz.inputs import mutated


async def test_no_input_harms_anybody_or_gets_an_unexpected_status() -> None:
    result = await fuzz(800, seed=1)
    expected = {door.name for door in (*STRANGERS, *peers(""))} | {"to a worker", "to a gateway"}
    assert set(result["statuses"]) == expected
    assert sum(sum(seen.values()) for seen in result["statuses"].values()) >= 800


def test_a_seed_makes_the_same_inputs_again_and_another_makes_others() -> None:
    seed = inference_pb2.GenerateRequest(prompt="The quick brown fox", max_tokens=2, logit_bias={3: 1.0})
    first, again, other = ([mutated(Random(f"{seed_no}/{n}"), seed) for n in range(50)] for seed_no in (1, 1, 2))
    assert first == again
    assert len(set(first) - set(other)) > 25


@pytest.mark.parametrize(
    ("line", "complains"),
    [
        (b"Traceback (most recent call last):", True),
        *((b'{"a": 1, %s}' % word, True) for word in COMPLAINTS),
        (b'{"event": "worker_cut_off", "level": "error"}', False),
    ],
)
def test_a_traceback_or_a_death_is_a_complaint_and_a_refusal_is_none(line: bytes, complains: bool) -> None:
    complaints: list[str] = []
    Watch.line(complaints, line)
    assert bool(complaints) is complains
