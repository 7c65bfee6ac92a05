"""A port that others can reach is refused unless it tells friend from stranger."""

import asyncio
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from gateway.config import Settings as GatewaySettings
from gateway.keys import Right, new_key
from protos.serving import Server
from protos.settings import ServiceSettings, is_loopback
from scheduler_service.config import Settings as SchedulerSettings
from worker_service.config import Settings as WorkerSettings
from worker_service.drafting.config import Settings as DrafterSettings

PEERS = [(SchedulerSettings, {}), (WorkerSettings, {"model": "/nowhere"}), (DrafterSettings, {"model": "/nowhere"})]


def make(kind: type[ServiceSettings], **values: Any) -> ServiceSettings:
    return kind(_cli_parse_args=False, **values)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    assert is_loopback(host)
    assert make(SchedulerSettings, host=host).host == host


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_an_ipv6_address_is_bound_with_or_without_its_brackets(host: str) -> None:
    server = Server([], 1024)
    port = await server.start(host, 0)
    _, writer = await asyncio.open_connection("::1", port)
    writer.close()
    await server.stop(0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "scheduler", ""])
@pytest.mark.parametrize(("kind", "values"), PEERS)
def test_elsewhere_needs_mutual_tls(kind: type[ServiceSettings], values: dict[str, Any], host: str) -> None:
    with pytest.raises(ValidationError, match=r"set --tls\.ca, --tls\.cert and --tls\.key"):
        make(kind, host=host, **values)


@pytest.mark.parametrize(("kind", "values"), PEERS)
def test_mutual_tls_is_enough(kind: type[ServiceSettings], values: dict[str, Any], certs: Path) -> None:
    folder = certs / "scheduler"
    tls = {"ca": folder / "ca.crt", "cert": folder / "tls.crt", "key": folder / "tls.key"}
    assert make(kind, host="0.0.0.0", tls=tls, **values).tls


@pytest.mark.parametrize(("kind", "values"), PEERS)
def test_who_says_so_may_do_without(kind: type[ServiceSettings], values: dict[str, Any]) -> None:
    assert make(kind, host="0.0.0.0", insecure=True, **values).insecure


@pytest.mark.parametrize("service", ["gateway", "scheduler_service"])
def test_a_process_says_what_to_set_and_ends(service: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", service, "--host", "0.0.0.0"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert "host: 0.0.0.0 can be reached from elsewhere" in ended.stderr
    assert "--insecure" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "kind"),
    [("gateway", GatewaySettings), ("scheduler_service", SchedulerSettings), ("worker_service", WorkerSettings)],
)
def test_the_commands_of_security_md_start_services_that_authenticate(
    module: str, kind: type[ServiceSettings], certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = re.findall(rf"^python -m {module} (.*)$", (Path(__file__).parents[2] / "SECURITY.md").read_text(), re.M)
    monkeypatch.chdir(certs / module.partition("_")[0])
    Path("api-keys").write_text(new_key("acme", [Right.GENERATE])[1])
    for name, file in {"CA": "ca.crt", "CERT": "tls.crt", "KEY": "tls.key"}.items():
        monkeypatch.setenv(f"LAPS_SD_TLS_{name}", file)
    (settings,) = [CliApp.run(kind, cli_args=shlex.split(flags)) for flags in told]
    assert settings.tls
    assert not settings.insecure


def test_a_gateway_needs_keys_and_a_certificate(certs: Path, tmp_path: Path) -> None:
    keys, folder = tmp_path / "keys", certs / "gateway"
    keys.write_text(new_key("acme", [Right.GENERATE])[1])
    shown = {"cert": folder / "tls.crt", "key": folder / "tls.key"}
    with pytest.raises(ValidationError, match="set --api-keys"):
        make(GatewaySettings, host="0.0.0.0", **shown)
    with pytest.raises(ValidationError, match="set --cert and --key"):
        make(GatewaySettings, host="0.0.0.0", api_keys=keys)
    assert make(GatewaySettings, host="0.0.0.0", api_keys=keys, **shown).api_keys == keys
    assert make(GatewaySettings, host="0.0.0.0", api_keys=keys, tls={"ca": folder / "ca.crt", **shown}).tls


@pytest.mark.parametrize("addresses", ["", "host", "host:", "a b:1", "a:1,", "a:1, b:2", "::1:5", "http://a:1"])
@pytest.mark.parametrize(("kind", "values"), [(GatewaySettings, {}), (WorkerSettings, {"model": "/nowhere"})])
def test_a_scheduler_that_nobody_can_dial_is_refused_at_the_start(
    kind: type[ServiceSettings], values: dict[str, Any], addresses: str
) -> None:
    with pytest.raises(ValidationError, match="is not HOST:PORT"):
        make(kind, scheduler=addresses, **values)


def test_schedulers_are_addresses_with_commas() -> None:
    addresses = "scheduler-1.example:50052,10.0.0.1:1,[::1]:2"
    assert make(GatewaySettings, scheduler=addresses).scheduler == addresses


@pytest.mark.parametrize("url", ["http://redis", "redis://u:se/cret@redis:6379", "redis://redis/0?nonsense=1"])
def test_a_url_that_is_none_is_refused_without_its_words(url: str) -> None:
    with pytest.raises(ValidationError, match="is not of the form redis://") as refused:
        make(SchedulerSettings, redis_url=url)
    assert "'se'" not in refused.value.errors()[0]["msg"]  # what redis-py quotes as no port


def test_keys_that_cannot_be_read_are_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="No such file"):
        make(GatewaySettings, api_keys=tmp_path / "nothing")
