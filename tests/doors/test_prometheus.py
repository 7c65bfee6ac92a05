"""A real Prometheus scrapes a live stack, and evaluates every expression of the dashboard."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio

from laps_sd.client import AsyncClient
from protos.errors import RequestError
from tests.doors.prometheus import Prometheus, prometheus
from tests.e2e.stack import Stack, running_stack
from tests.observe.collector import Collector, attributes, collector
from tests.observe.dashboard import concrete, expressions
from tests.tiny_model import make_tiny_model
from tests.waiting import WAIT_S, until

CONFIG = Path(__file__).parents[2] / "deploy" / "prometheus" / "prometheus.yml"
SCRAPES = 8  # while requests run
CALLER = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
MOST_REQUESTS = 12  # of the tenant; one more is refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the configuration that comes with LAPS-SD, but scraping every second."""
    made = tmp_path_factory.mktemp("prometheus")
    config = CONFIG.read_text()
    (made / "prometheus.yml").write_text(config.replace("scrape_interval: 5s", "scrape_interval: 1s"))
    (made / "tenants").write_text(f"* requests={MOST_REQUESTS}\n")
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traces() -> AsyncIterator[Collector]:
    async with collector() as kept:
        yield kept


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(folder: Path, traces: Collector) -> AsyncIterator[Stack]:
    model = make_tiny_model(folder / "tiny", context_tokens=32_768)
    flags = ["--slots", "2", "--metrics-targets", str(folder / "targets.json"), "--tenants", str(folder / "tenants")]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", traces.endpoint)
        async with running_stack(model, folder, *flags) as running:
            yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scraped(stack: Stack, folder: Path) -> AsyncIterator[tuple[Prometheus, float]]:
    """A Prometheus that has scraped the stack while it was busy, and since when."""
    async with prometheus(folder / "prometheus.yml") as running:

        async def all_up() -> bool:
            return [series["value"][1] for series in await running.query("up")] == ["1", "1", "1"]

        await until(all_up)
        began = time.time()
        await under_load(stack, running)
        yield running, began


async def under_load(stack: Stack, running: Prometheus) -> None:
    """Short answers and long ones, more than there are slots, some of which are refused, for SCRAPES scrapes."""
    over, some_ended, endings = asyncio.Event(), asyncio.Condition(), 0

    async def ask(client: AsyncClient, number: int) -> None:
        nonlocal endings
        while not over.is_set():
            long = number % 2
            try:
                await client.complete(
                    f"Once upon a time {number}",
                    max_tokens=400 if long else 40,
                    stop=[] if long else ["e"],
                    seed=number,
                )
            except RequestError:  # a refused one comes again once another has ended
                async with some_ended:
                    before = endings
                    await some_ended.wait_for(lambda: endings > before or over.is_set())  # noqa: B023
            else:
                async with some_ended:
                    endings += 1
                    some_ended.notify_all()

    async def scrapes() -> int:
        (series,) = await running.query("min(sum_over_time(up[1h]))")
        return int(series["value"][1])

    before = await scrapes()

    async def enough() -> bool:
        return await scrapes() >= before + SCRAPES

    async with AsyncClient(stack.grpc, max_retries=0) as client, asyncio.TaskGroup() as tasks:
        for number in range(MOST_REQUESTS + 4):
            tasks.create_task(ask(client, number))
        await until(enough)
        async with some_ended:
            over.set()
            some_ended.notify_all()


@pytest.mark.asyncio(loop_scope="module")
async def test_each_service_is_a_target(scraped: tuple[Prometheus, float], folder: Path) -> None:
    running, _ = scraped
    targets = {series["metric"]["process"]: series["metric"] for series in await running.query("up == 1")}
    assert targets.keys() == {"gateway", "scheduler", "worker-0"}
    assert {metric["service"] for metric in targets.values()} == {"gateway", "scheduler", "worker"}
    assert len(json.loads((folder / "targets.json").read_text())) == 3


@pytest.mark.asyncio(loop_scope="module")
async def test_each_service_tells_whether_it_lives_and_is_ready(
    scraped: tuple[Prometheus, float], folder: Path
) -> None:
    async with httpx2.AsyncClient(timeout=WAIT_S) as client:
        for group in json.loads((folder / "targets.json").read_text()):
            (at,) = group["targets"]
            answers = [(await client.get(f"http://{at}/{path}")).status_code for path in ("live", "health", "else")]
            assert answers == [200, 200, 404], group


@pytest.mark.asyncio(loop_scope="module")
async def test_a_trace_goes_through_the_services(scraped: tuple[Prometheus, float], traces: Collector) -> None:
    call, queued, stay = await traces.until(
        ("laps-sd-gateway", "text_completion tiny"), ("laps-sd-scheduler", "queued"), ("laps-sd-worker", "worker")
    )
    assert call.kind == call.SPAN_KIND_SERVER
    assert queued.parent_span_id
    assert attributes(stay)["laps_sd.worker"] == "worker-0"


@pytest.mark.asyncio(loop_scope="module")
async def test_over_http_the_callers_trace_goes_on(stack: Stack, traces: Collector) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    async with httpx2.AsyncClient(timeout=WAIT_S) as client:
        url = f"http://{stack.http}/v1/chat/completions"
        answer = await client.post(url, json=body, headers={"traceparent": CALLER})
        assert answer.status_code == 200, answer.text
    (call,) = await traces.until(("laps-sd-gateway", "chat tiny"))
    assert f"00-{call.trace_id.hex()}-{call.parent_span_id.hex()}-01" == CALLER


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("title", "expression"), list(expressions()))
async def test_every_expression_of_the_dashboard_has_values(
    scraped: tuple[Prometheus, float], title: str, expression: str
) -> None:
    running, began = scraped
    series = await running.query_range(concrete(expression, "5s"), began, time.time())
    values = [float(value) for one in series for _, value in one["values"]]
    assert any(map(math.isfinite, values)), f"{title}: {expression}"
