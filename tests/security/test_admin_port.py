"""What only administrators need, on a port of its own: figures over gRPC, and the metrics."""

import asyncio
import ssl
import urllib.request
from pathlib import Path
from urllib.error import HTTPError

import pytest
from pydantic import ValidationError

from gateway.config import Settings
from gateway.keys import Right, new_key
from laps_sd.client import AsyncClient
from protos.errors import Forbidden
from protos.v1 import status_pb2
from tests.gateway.harness import WAIT_S, Scheduler, gateway

NAMES = {"ca": "ca.crt", "cert": "tls.crt", "key": "tls.key"}


@pytest.fixture
async def scheduler() -> Scheduler:
    return Scheduler()


async def test_without_an_admin_port_one_port_serves_all(scheduler: Scheduler) -> None:
    await scheduler.start()
    async with gateway(scheduler) as served, AsyncClient(served.grpc, max_retries=0) as client:
        await client.ready(WAIT_S)
        assert served.admin is None
        assert (await client.stats()).waiting == 3
    await scheduler.stop()


async def test_with_one_the_public_port_serves_requests_alone(scheduler: Scheduler) -> None:
    await scheduler.start()
    scheduler.known["r"] = status_pb2.RequestStatus(request_id="r")
    async with gateway(scheduler, admin_port=0) as served:
        assert served.admin is not None
        async with AsyncClient(served.grpc, max_retries=0) as client:
            await client.ready(WAIT_S)
            with pytest.raises(Forbidden, match="not served on this port"):
                await client.stats()
            with pytest.raises(Forbidden, match="not served on this port"):
                await client.drain_worker("w")
            assert (await client.status("r")).request_id == "r"
        async with AsyncClient(served.admin, max_retries=0) as client:
            await client.ready(WAIT_S)
            assert (await client.stats()).waiting == 3
            assert (await client.status("r")).request_id == "r"
            with pytest.raises(Forbidden, match="not served on this port"):
                await client.complete("a")
    await scheduler.stop()


async def test_a_public_port_never_serves_figures(scheduler: Scheduler) -> None:
    await scheduler.start()
    async with gateway(scheduler, host="0.0.0.0", insecure=True) as served:
        async with AsyncClient(f"127.0.0.1:{served.grpc.rpartition(':')[2]}", max_retries=0) as client:
            await client.ready(WAIT_S)
            with pytest.raises(Forbidden, match="not served on this port"):
                await client.stats()
        url = f"http://127.0.0.1:{served.http.rpartition(':')[2]}/metrics"
        with pytest.raises(HTTPError, match="403"):
            await asyncio.to_thread(urllib.request.urlopen, url, timeout=WAIT_S)
    await scheduler.stop()


def read(url: str, context: ssl.SSLContext) -> bytes:
    with urllib.request.urlopen(url, timeout=WAIT_S, context=context) as answer:
        return bytes(answer.read())


async def test_metrics_from_elsewhere_need_a_certificate(scheduler: Scheduler, certs: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(new_key("ops", [Right.ADMIN])[1])
    await scheduler.start()
    tls = {name: certs / "gateway" / file for name, file in NAMES.items()}
    async with gateway(scheduler, admin_host="0.0.0.0", metrics_port=0, api_keys=tmp_path / "keys", tls=tls) as served:
        assert served.metrics
        url = f"https://127.0.0.1:{served.metrics.rpartition(':')[2]}/metrics"
        context = ssl.create_default_context(cafile=tls["ca"])
        with pytest.raises(OSError, match=r"(?i)certificate required|reset|closed|EOF|aborted"):
            await asyncio.to_thread(read, url, context)
        context.load_cert_chain(certs / "worker" / "tls.crt", certs / "worker" / "tls.key")
        assert b"laps_sd_num_requests_live" in await asyncio.to_thread(read, url, context)
    await scheduler.stop()


def test_an_admin_port_that_others_reach_needs_keys_and_certificates() -> None:
    with pytest.raises(ValidationError, match=r"admin_host: 0\.0\.0\.0 can be reached from elsewhere: set --api-keys"):
        Settings(_cli_parse_args=False, admin_host="0.0.0.0")  # type: ignore[call-arg]
