"""Mutual TLS between services, over real connections: who gets in and who does not; certificates that are renewed."""

import asyncio
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from unittest import mock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.config import Settings as GatewaySettings
from laps_sd.authority import make_certs
from protos.link.v1 import gateway_link_pb2_grpc, worker_link_pb2, worker_link_pb2_grpc
from protos.serving import LINK_MESSAGE_BYTES, Server, channel
from protos.settings import ServiceSettings, read
from protos.tls import Files, PeerNames, Tls
from protos.v1 import inference_pb2, status_pb2
from scheduler_service.config import Settings as SchedulerSettings
from tests.waiting import WAIT_S


def tls(folder: Path) -> Tls:
    return Tls(ca=folder / "ca.crt", cert=folder / "tls.crt", key=folder / "tls.key")


class Scheduler(gateway_link_pb2_grpc.GatewayLinkServicer):
    async def Stats(self, request: inference_pb2.StatsRequest, context: object) -> status_pb2.StatsResponse:  # noqa: N802
        return status_pb2.StatsResponse(policy="fcfs")

    async def Link(self, requests: object, context: grpc.aio.ServicerContext) -> None:  # type: ignore[override] # noqa: N802
        return


class Workers(worker_link_pb2_grpc.WorkerLinkServicer):
    async def Announce(self, request: worker_link_pb2.AnnounceRequest, context: grpc.aio.ServicerContext) -> None:  # type: ignore[override] # noqa: N802
        await context.write(worker_link_pb2.Announced())


@asynccontextmanager
async def serving(identity: Tls) -> AsyncIterator[str]:
    """A scheduler's port with a service for gateways alone and one for workers alone; yields HOST:PORT."""
    names = PeerNames({"laps_sd.link.v1.GatewayLink": ["gateway"], "laps_sd.link.v1.WorkerLink": ["worker"]})
    server = Server(
        ["laps_sd.link.v1.GatewayLink"], LINK_MESSAGE_BYTES, identity.server_credentials(), interceptors=[names]
    )
    gateway_link_pb2_grpc.add_GatewayLinkServicer_to_server(Scheduler(), server.grpc)
    worker_link_pb2_grpc.add_WorkerLinkServicer_to_server(Workers(), server.grpc)
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def ask(target: str, credentials: grpc.ChannelCredentials | None) -> status_pb2.StatsResponse:
    async with channel(target, credentials) as link:
        stub = gateway_link_pb2_grpc.GatewayLinkStub(link)
        stats: status_pb2.StatsResponse = await stub.Stats(inference_pb2.StatsRequest(), timeout=WAIT_S)
        return stats


async def status(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(target, credentials)
    code: grpc.StatusCode = refused.value.code()
    return code


async def test_a_peer_with_a_certificate_of_the_ca_gets_in(certs: Path) -> None:
    async with serving(tls(certs / "scheduler")) as target:
        assert (await ask(target, tls(certs / "gateway").channel_credentials())).policy == "fcfs"


async def test_neither_plaintext_nor_a_stranger_gets_in(certs: Path, tmp_path: Path) -> None:
    make_certs(tmp_path / "other")
    stranger = tls(tmp_path / "other" / "gateway")
    trusting = (certs / "gateway" / "ca.crt").read_bytes()
    async with serving(tls(certs / "scheduler")) as target:
        assert await status(target, None) is grpc.StatusCode.UNAVAILABLE
        assert await status(target, grpc.ssl_channel_credentials(trusting)) is grpc.StatusCode.UNAVAILABLE
        key, cert = (tmp_path / "other" / "gateway" / f"tls.{kind}" for kind in ("key", "crt"))
        shown = grpc.ssl_channel_credentials(trusting, key.read_bytes(), cert.read_bytes())
        assert await status(target, shown) is grpc.StatusCode.UNAVAILABLE
        assert await status(target, stranger.channel_credentials()) is grpc.StatusCode.UNAVAILABLE


async def test_a_workers_certificate_does_not_pass_for_the_schedulers(certs: Path) -> None:
    async with serving(tls(certs / "worker")) as target:
        assert await status(target, tls(certs / "gateway").channel_credentials()) is grpc.StatusCode.UNAVAILABLE


async def test_an_expired_certificate_gets_nobody_in_on_either_side(certs: Path, tmp_path: Path) -> None:
    expired = Path(shutil.copytree(certs, tmp_path / "expired"))
    make_certs(expired, days=-1)
    async with serving(tls(certs / "scheduler")) as target:
        assert await status(target, tls(expired / "gateway").channel_credentials()) is grpc.StatusCode.UNAVAILABLE
    async with serving(tls(expired / "scheduler")) as target:
        assert await status(target, tls(certs / "gateway").channel_credentials()) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("kind", [GatewaySettings, SchedulerSettings])
def test_a_service_whose_certificate_has_expired_does_not_start(
    certs: Path, kind: type[ServiceSettings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No peer would take it, and none could say so. It may be started again: somebody may renew it."""
    monkeypatch.setattr("sys.argv", ["service"])
    make_certs(certs, days=-1)
    for name, file in {"CA": "ca.crt", "CERT": "tls.crt", "KEY": "tls.key"}.items():
        monkeypatch.setenv(f"LAPS_SD_TLS_{name}", str(certs / "gateway" / file))
    with pytest.raises(SystemExit) as ended:
        read(kind, "service")
    assert ended.value.code == 1
    assert re.fullmatch(r"service: .*tls\.crt expired on 2.*: renew it\n", capsys.readouterr().err)


async def test_a_certificate_of_another_name_is_not_the_schedulers(
    certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laps_sd.authority.LOCAL_NAMES", ())
    (certs / "scheduler" / "tls.crt").unlink()
    make_certs(certs, ["elsewhere.example"])
    async with serving(tls(certs / "scheduler")) as target:
        assert await status(target, tls(certs / "gateway").channel_credentials()) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("streams", [False, True])
async def test_a_worker_may_not_do_what_gateways_do(certs: Path, streams: bool) -> None:
    worker = tls(certs / "worker").channel_credentials()
    async with serving(tls(certs / "scheduler")) as target, channel(target, worker) as link:
        stub = gateway_link_pb2_grpc.GatewayLinkStub(link)
        call = stub.Link(timeout=WAIT_S) if streams else stub.Stats(inference_pb2.StatsRequest(), timeout=WAIT_S)
        assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "gateway may call this" in await call.details()


async def test_a_worker_alone_may_announce_one(certs: Path) -> None:
    async with serving(tls(certs / "scheduler")) as target:
        async with channel(target, tls(certs / "worker").channel_credentials()) as link:
            call = worker_link_pb2_grpc.WorkerLinkStub(link).Announce(worker_link_pb2.AnnounceRequest(), timeout=WAIT_S)
            assert await call.read() == worker_link_pb2.Announced()
        async with channel(target, tls(certs / "gateway").channel_credentials()) as link:
            call = worker_link_pb2_grpc.WorkerLinkStub(link).Announce(worker_link_pb2.AnnounceRequest(), timeout=WAIT_S)
            assert await call.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_any_peer_may_ask_whether_it_is_well(certs: Path) -> None:
    worker = tls(certs / "worker").channel_credentials()
    async with serving(tls(certs / "scheduler")) as target, channel(target, worker) as link:
        answer = await health_pb2_grpc.HealthStub(link).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_renewed_certificate_is_shown_without_a_restart(certs: Path) -> None:
    async with serving(tls(certs / "scheduler")) as target:
        before = await shown_by(target, certs / "gateway")
        make_certs(certs)
        assert await shown_by(target, certs / "gateway") != before
        assert (await ask(target, tls(certs / "gateway").channel_credentials())).policy == "fcfs"


def test_a_handshake_replaces_nothing_while_the_files_are_the_same(certs: Path) -> None:
    """gRPC frees what is replaced, though another handshake may be using it: the process crashed."""
    with mock.patch.object(grpc, "dynamic_ssl_server_credentials") as made:
        tls(certs / "gateway").server_credentials()
    _, changed, _ = made.call_args.args
    assert changed() is None
    make_certs(certs)
    assert changed() is not None
    assert changed() is None


def test_many_handshakes_at_the_same_time_crash_nothing(certs: Path) -> None:
    """In a process of its own, which would be gone after a thousand or two."""
    command = [sys.executable, "-m", "tests.security.port", str(certs / "gateway")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=Path(__file__).parents[2]) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        context = context_of(certs / "gateway")

        def shake(number: int) -> bool:
            """Whether there was a whole handshake."""
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), WAIT_S) as plain:
                if number % 3:  # the others leave in the middle
                    context.wrap_socket(plain, server_hostname="localhost").close()
                    return True
            return False

        with ThreadPoolExecutor(16) as pool:
            assert sum(pool.map(shake, range(4000))) > 2600  # nearly all of two thirds
        assert server.poll() is None
        server.communicate()
        assert server.returncode == 0


def context_of(identity: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=identity / "ca.crt")
    context.load_cert_chain(identity / "tls.crt", identity / "tls.key")
    context.set_alpn_protocols(["h2"])
    return context


async def shown_by(target: str, identity: Path) -> bytes:
    """The certificate that a server shows."""
    context = context_of(identity)
    host, _, port = target.partition(":")
    async with asyncio.timeout(WAIT_S):
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return shown


def test_half_of_a_renewal_changes_nothing(certs: Path) -> None:
    folder = certs / "gateway"
    files = Files(folder / "ca.crt", folder / "tls.crt", folder / "tls.key")
    before = files.read()
    os.replace(certs / "worker" / "tls.key", folder / "tls.key")
    assert files.read() == before
    os.replace(certs / "worker" / "tls.crt", folder / "tls.crt")
    assert files.read().cert != before.cert


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"ca": "ca.crt"}, "belong together"),
        ({"ca": "ca.crt", "cert": "tls.crt", "key": "nowhere.key"}, "nowhere.key: No such file"),
        ({"ca": "ca.crt", "cert": "tls.crt", "key": "../worker/tls.key"}, "key values mismatch"),
        ({"ca": "ca.crt", "cert": "tls.key", "key": "tls.key"}, "no usable PEM"),
    ],
)
def test_files_that_are_of_no_use_are_refused_at_the_start(certs: Path, files: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Tls(**{name: certs / "gateway" / file for name, file in files.items()})
