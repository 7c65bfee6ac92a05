"""Families of metrics, as Prometheus reads them."""

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from protos.metrics import GEN_AI, Distribution, Families


def parsed(families: Families) -> dict[str, object]:
    text = generate_latest(families.registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_every_name_has_the_prefix_that_was_asked_for() -> None:
    families = Families("vllm:")
    families.gauge("num_requests_running", "text", lambda: 3.0)
    assert families.registry.get_sample_value("vllm:num_requests_running") == 3


def test_samples_name_the_model_once_it_is_known() -> None:
    model = ""
    families = Families(model=lambda: model)
    families.gauge("workers", "text", lambda: 1.0)
    assert families.registry.get_sample_value("laps_sd_workers") == 1
    model = "tiny"
    assert families.registry.get_sample_value("laps_sd_workers", {"model_name": "tiny"}) == 1


def test_a_counter_is_kept_by_the_value_of_its_label() -> None:
    families = Families()
    counts = families.counts("requests", "text", "status")
    counts["OK"] += 2
    assert families.registry.get_sample_value("laps_sd_requests_total", {"status": "OK"}) == 2


def test_a_family_with_nothing_to_tell_has_no_samples() -> None:
    families = Families()
    families.gauge("backlog_seconds", "text", dict, "class")
    assert parsed(families)["laps_sd_backlog_seconds"].samples == []  # type: ignore[attr-defined]


def test_buckets_are_cumulative_and_the_last_one_has_no_end() -> None:
    families = Families()
    kept = families.distribution("seconds", "text", (1, 2))
    for value in (0.5, 1.0, 1.5, 9.0):
        kept.observe(value)
    read = families.registry.get_sample_value
    buckets = [read("laps_sd_seconds_bucket", {"le": le}) for le in ("1.0", "2.0", "+Inf")]
    assert buckets == [2, 3, 4]
    assert (read("laps_sd_seconds_count"), read("laps_sd_seconds_sum")) == (4, 12)
    assert Distribution((1,)).count == 0


def test_names_and_types_parse_as_they_were_declared() -> None:
    families = Families()
    families.gauge("one", "text", lambda: 1.0)
    families.counts("two", "text")
    families.distribution("three", 'with "quotes" and a\nbreak')
    kinds = {name: family.type for name, family in parsed(families).items()}  # type: ignore[attr-defined]
    assert kinds.items() >= {"laps_sd_one": "gauge", "laps_sd_two": "counter", "laps_sd_three": "histogram"}.items()


def test_a_family_of_a_convention_has_the_conventions_name_and_label() -> None:
    families = Families("vllm:", lambda: "tiny")
    kept = Distribution((1.0,))
    kept.observe(0.5)
    families.histogram("request_duration_seconds", "text", lambda: kept, convention=GEN_AI)
    name, labels = "gen_ai_server_request_duration_seconds_sum", {"gen_ai_request_model": "tiny"}
    assert families.registry.get_sample_value(name, labels) == 0.5
