"""The dashboard and the page of metrics say what the services declare. tests/doors evaluates every expression."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import Metrics as Gateway
from scheduler_service.metrics import Metrics as Scheduler
from tests.observe.dashboard import DASHBOARD, NAME, expressions
from worker_service.metrics import Metrics as Worker

PAGE = Path(__file__).parents[2] / "deploy" / "metrics_page.py"


@pytest.fixture(scope="module")
def metrics_page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("metrics_page", PAGE)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def declared(metrics_page: ModuleType) -> dict[str, str]:
    """The type of every family of any service, by the name of its samples without the suffixes of histograms."""
    kinds = {}
    for families in metrics_page.services().values():
        for family in text_string_to_metric_families(generate_latest(families.registry).decode()):
            kinds[family.name + ("_total" if family.type == "counter" else "")] = family.type
    return kinds


def test_every_metric_of_the_dashboard_is_declared(metrics_page: ModuleType) -> None:
    known = declared(metrics_page)
    named = {name for _, expression in expressions() for name in NAME.findall(expression)}
    histograms = {f"{name}_{part}" for name, kind in known.items() if kind == "histogram" for part in PARTS}
    assert named <= known.keys() | histograms


def test_every_family_parses_with_the_type_that_it_was_declared_with(metrics_page: ModuleType) -> None:
    known = declared(metrics_page)
    for families in metrics_page.services().values():
        for name, kind, _, _ in families.table():
            assert known[name] == kind


def test_only_the_lag_of_the_loop_is_told_by_several_services(metrics_page: ModuleType) -> None:
    """A sum over all processes must count nothing twice."""
    names = [name for families in metrics_page.services().values() for name, *_ in families.table()]
    assert {name for name in names if names.count(name) > 1} == {"laps_sd_event_loop_lag_seconds"}


def test_the_page_of_metrics_is_up_to_date(metrics_page: ModuleType) -> None:
    assert metrics_page.PAGE.read_text() == metrics_page.page(), "run `python deploy/metrics_page.py`"


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
    registries = [Gateway("vllm:"), Scheduler(lambda: None, "vllm:"), Worker(1, "vllm:")]
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
