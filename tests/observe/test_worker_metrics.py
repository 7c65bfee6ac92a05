"""What Prometheus sees of a worker, from what its steps did."""

from worker_service.engine.types import Row, Skip, StepResult
from worker_service.metrics import Metrics
from worker_service.reporting import Seconds
from worker_service.tally import Tally

FIRST = StepResult(
    (
        Row("a", 1, 0, tokens=(1, 2, 3), drafted=4, accepted=2),
        Row("b", 1, 0, tokens=(1,), prefilled=7),
        Row("c", 1, 0, skipped=Skip.NO_BLOCKS),
    ),
    free_blocks=75,
    draft_s=0.25,
    verify_s=0.5,
    other_s=0.0,
)
SECOND = StepResult((Row("a", 1, 3, tokens=(1, 2), drafted=1, accepted=1),), 50, 0.25, 0.5, 0.0, apart=frozenset({"a"}))


def served() -> Metrics:
    metrics, tally = Metrics(), Tally()
    metrics.serve("tiny", tally, lambda: 100)
    tally.add(FIRST, Seconds(0.25, 0.5, 0.125, 1.0))
    tally.add(SECOND, Seconds(0.25, 0.5, 0.125, 0.0))
    return metrics


def read(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"laps_sd_{name}", {"model_name": "tiny", **labels})


def test_acceptance_is_told_by_position() -> None:
    metrics = served()
    drafted = [read(metrics, "spec_decode_num_draft_tokens_per_pos_total", position=str(at)) for at in range(5)]
    accepted = [read(metrics, "spec_decode_num_accepted_tokens_per_pos_total", position=str(at)) for at in range(3)]
    assert drafted == [2, 1, 1, 1, None]
    assert accepted == [2, 1, None]
    assert read(metrics, "spec_decode_num_drafts_total") == 2
    assert read(metrics, "spec_decode_num_draft_tokens_total") == 5
    assert read(metrics, "spec_decode_num_accepted_tokens_total") == 3
    assert read(metrics, "spec_decode_num_remote_draft_tokens_total") == 1
    assert read(metrics, "spec_decode_num_remote_accepted_tokens_total") == 1


def test_steps_are_told_with_their_time_by_phase() -> None:
    metrics = served()
    phases = {phase: read(metrics, "step_seconds_total", phase=phase) for phase in ("draft", "verify", "other", "idle")}
    assert phases == {"draft": 0.5, "verify": 1.0, "other": 0.25, "idle": 1.0}
    assert [read(metrics, f"{name}_total") for name in ("steps", "step_tokens", "step_prefilled_tokens")] == [2, 6, 7]


def test_the_kv_memory_in_use_is_told() -> None:
    metrics = served()
    assert read(metrics, "kv_cache_usage_perc") == 0.5
    assert read(metrics, "step_requests") == 1


def test_before_the_model_is_loaded_nothing_is_in_use() -> None:
    assert Metrics().registry.get_sample_value("laps_sd_kv_cache_usage_perc") == 0
