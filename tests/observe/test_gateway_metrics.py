"""What the gateway counts of one answer."""

import pytest

from gateway.feed import Batch
from gateway.metrics import Metrics
from protos.link.v1 import gateway_link_pb2 as pb
from protos.v1 import types_pb2

STOP = pb.Ending(finish_reason=types_pb2.FINISH_REASON_STOP)


def test_time_to_the_first_token_and_between_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    metrics = Metrics()
    answer = metrics.answer()
    answer.started = now
    now = 102.0
    answer.add(Batch(0, [1]))
    now = 102.5
    answer.add(Batch(1, [2, 3]))
    assert (metrics.ttft.count, metrics.ttft.sum) == (1, 2.0)  # at once, and not at the answer's end
    assert (metrics.itl.count, metrics.itl.sum) == (1, 0.5)
    now = 106.0
    answer.add(Batch(3, [], ending=STOP))
    metrics.finished(answer, prompt_tokens=7)
    assert metrics.itl.count == 1
    assert (metrics.e2e.sum, metrics.tpot.sum) == (6.0, 2.0)
    assert (metrics.success["stop"], metrics.prompt_tokens[""], metrics.generation_tokens[""]) == (1, 7, 3)
    by_convention = {
        name: metrics.registry.get_sample_value(f"gen_ai_server_{name}_seconds_sum")
        for name in ("request_duration", "time_to_first_token", "time_per_output_token")
    }
    assert by_convention == {"request_duration": 6, "time_to_first_token": 2, "time_per_output_token": 2}
    assert (metrics.prompt_lengths.sum, metrics.output_lengths.sum) == (7, 3)
