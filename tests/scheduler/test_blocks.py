"""However short the memory is, every request ends: on a worker whose blocks fill as the engine's do."""

from random import Random

import pytest

from scheduler_service.core.events import Submitted
from tests.scheduler.blocks import SIZE, BlockWorker
from tests.scheduler.builders import RequestClass, core, request

LARGEST = 8  # blocks of a request, beside those that all share


@pytest.mark.parametrize("shared", [0, 3])
@pytest.mark.parametrize("host", [0, 6, 20])
@pytest.mark.parametrize("policy", ["fcfs", "las", "gittins", "laps-sd"])
def test_all_requests_end(policy: str, host: int, shared: int) -> None:
    for seed in range(20):
        rng, lengths = Random(f"{policy} {host} {shared} {seed}"), dict[str, int]()
        total = shared + rng.randint(LARGEST, 2 * LARGEST)
        worker = BlockWorker(core(policy), lengths, total, rng.choice([1, 2, 4]), shared, host, rng)
        idle = number = 0
        while number < 14 or worker.core.fleet.entries:
            if number < 14:
                prompt = shared * SIZE + rng.choice([SIZE, 2 * SIZE, rng.randint(1, 3 * SIZE)])
                lengths[id := str(number)] = rng.choice([3, 40, 70])
                klass = rng.choice(list(RequestClass))
                submitted = request(id, worker.now, prompt=prompt, max_tokens=lengths[id], klass=klass)
                worker.core.observe(Submitted(submitted), worker.now)
            number += 1
            idle = 0 if worker.step() else idle + 1
            assert idle < 5, f"seed {seed}: nobody runs"
