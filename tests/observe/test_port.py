"""The HTTP port of a service that has no other: /metrics, /health, /live, and nothing else."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx2
import pytest
import structlog

from protos.metrics import Families, loop_lag
from protos.observed import exposition, observed
from protos.settings import ServiceSettings
from tests.waiting import WAIT_S, until


class Service:
    def __init__(self, **settings: Any) -> None:
        self.settings = ServiceSettings(**settings)
        self.families = Families()
        self.lag = loop_lag(self.families)
        self.ready = False

    def observed(self, port: int | None = 0) -> Any:
        return observed(self.settings, port, self.families, self.lag, lambda: self.ready)


async def where(service: Service, logs: list[Any]) -> str:
    return str(next(log["at"] for log in logs if log["event"] == "serving_metrics"))


async def get(url: str, **more: Any) -> httpx2.Response:
    async with httpx2.AsyncClient(timeout=WAIT_S, **more) as client:
        return await client.get(url)


async def test_it_serves_metrics_and_nothing_that_is_not_its_own() -> None:
    service = Service()
    with structlog.testing.capture_logs() as logs:
        async with service.observed():
            at = await where(service, logs)
            metrics = await get(f"http://{at}/metrics")
            assert "laps_sd_event_loop_lag_seconds_count" in metrics.text
            assert metrics.headers["content-type"].startswith("text/plain; version=")
            assert (await get(f"http://{at}/")).status_code == 404
            assert (await get(f"http://{at}/metrics/")).status_code == 404


async def test_others_run_while_prometheus_is_answered() -> None:
    families, turns = Families(), 0
    read_at = []
    for number in range(10):
        families.gauge(f"gauge_{number}", "text", lambda: read_at.append(turns) or 0.0)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    text = await exposition(families.registry)
    running.cancel()
    assert len(set(read_at)) == 10
    assert text.count(b"# TYPE laps_sd_gauge_") == 10


async def test_health_tells_whether_it_is_ready_and_live_whether_it_lives() -> None:
    service = Service()
    with structlog.testing.capture_logs() as logs:
        async with service.observed():
            at = await where(service, logs)
            assert (await get(f"http://{at}/health")).status_code == 503
            assert (await get(f"http://{at}/live")).status_code == 200
            service.ready = True
            assert (await get(f"http://{at}/health")).status_code == 200


async def test_the_lag_of_the_loop_is_measured_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protos.metrics.LAG_EVERY_S", 0.0)
    service = Service()
    async with service.observed():

        async def measured() -> bool:
            return service.lag.count > 0

        await until(measured)


async def test_without_a_port_there_is_none() -> None:
    service = Service()
    async with service.observed(None):
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "loop lag"]


async def test_elsewhere_than_on_loopback_a_reader_shows_a_certificate(certs: Path) -> None:
    tls = {name: str(certs / "scheduler" / file) for name, file in _FILES.items()}
    service = Service(host="0.0.0.0", tls=tls)
    with structlog.testing.capture_logs() as logs:
        async with service.observed():
            port = (await where(service, logs)).rpartition(":")[2]
            stranger = ssl.create_default_context(cafile=tls["ca"])
            with pytest.raises(httpx2.TransportError):
                await get(f"https://localhost:{port}/metrics", verify=stranger)
            known = ssl.create_default_context(cafile=tls["ca"])
            known.load_cert_chain(tls["cert"], tls["key"])
            assert (await get(f"https://localhost:{port}/metrics", verify=known)).status_code == 200


_FILES = {"ca": "ca.crt", "cert": "tls.crt", "key": "tls.key"}
