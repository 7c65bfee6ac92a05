"""The dashboard says what the services declare. tests/doors evaluates every expression."""

import json

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deploy.reference.pages import services
from gateway.metrics import Metrics as Gateway
from scheduler_service.metrics import Metrics as Scheduler
from tests.observe.dashboard import DASHBOARD, NAME, expressions
from worker_service.metrics import Metrics as Worker


def declared() -> dict[str, str]:
    """The type of every family of any service, by the name of its samples without the suffixes of histograms."""
    kinds = {}
    for families in services().values():
        for family in text_string_to_metric_families(generate_latest(families.registry).decode()):
            kinds[family.name + ("_total" if family.type == "counter" else "")] = family.type
    return kinds


def test_every_metric_of_the_dashboard_is_declared() -> None:
    known = declared()
    named = {name for _, expression in expressions() for name in NAME.findall(expression)}
    histograms = {f"{name}_{part}" for name, kind in known.items() if kind == "histogram" for part in PARTS}
    assert named <= known.keys() | histograms


def test_every_family_parses_with_the_type_that_it_was_declared_with() -> None:
    known = declared()
    for families in services().values():
        for name, kind, _, _ in families.table():
            assert known[name] == kind


def test_only_the_lag_of_the_loop_is_told_by_several_services() -> None:
    """A sum over all processes must count nothing twice."""
    names = [name for families in services().values() for name, *_ in families.table()]
    assert {name for name in names if names.count(name) > 1} == {"laps_sd_event_loop_lag_seconds"}


def test_panels_have_titles_of_their_own_and_lie_beside_each_other() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)


PARTS = ("bucket", "sum", "count")


def test_under_vllms_prefix_its_own_dashboards_find_what_they_ask_for() -> None:
    """The families that vLLM's dashboards show, but for its prefix cache, which is counted otherwise here."""
    registries = [Gateway("vllm:"), Scheduler(lambda: None, "vllm:"), Worker("vllm:")]
    names = {name for families in registries for name, *_ in families.table()}
    assert names >= {f"vllm:{name}" for name in VLLM}


VLLM = [
    "e2e_request_latency_seconds",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_success_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
]
