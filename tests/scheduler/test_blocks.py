"""However short the memory is, every request ends: on a worker whose blocks fill as the engine's do."""

from random import Random

import pytest

from scheduler_service.core.types import Submitted
from tests.scheduler.blocks import SIZE, BlockWorker
from tests.scheduler.builders import RequestClass, core, request


@pytest.mark.parametrize("shared", [0, 3 * SIZE])
@pytest.mark.parametrize("policy", ["fcfs", "las", "gittins", "laps-sd"])
def test_all_requests_end(policy: str, shared: int) -> None:
    for seed in range(40):
        rng = Random(f"{policy} {shared} {seed}")
        largest = shared + 8 * SIZE
        total = rng.randint(largest // SIZE, 2 * largest // SIZE)
        queue, lengths = core(policy), dict[str, int]()
        worker = BlockWorker(queue, lengths, total, rng.choice([1, 2, 4]), shared, rng)
        waiting = 0
        for number in range(200_000):
            if number < 12:
                id = str(number)
                prompt = shared + rng.choice([SIZE, 2 * SIZE, rng.randint(1, 3 * SIZE)])
                lengths[id] = min(rng.choice([3, 40, 70]), (largest - prompt) - 12)
                klass = rng.choice(list(RequestClass))
                what = request(id, worker.now, prompt=prompt, max_tokens=lengths[id], klass=klass)
                queue.observe(Submitted(what), worker.now)
            waiting = 0 if worker.step() else waiting + 1
            assert waiting < 5, f"seed {seed}: nobody runs"
            if not queue.fleet.entries:
                break
        assert not queue.fleet.entries
