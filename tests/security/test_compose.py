"""The compose file: hardened containers, flags that the services understand, no way in without key or certificate."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_settings import BaseSettings, CliApp

from gateway.config import Settings as GatewaySettings
from gateway.keys import Right, new_key
from laps_sd.authority import PURPOSES
from scheduler_service.config import Settings as SchedulerSettings
from worker_service.config import Settings as WorkerSettings

ROOT = Path(__file__).parents[2]
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
GPU: dict[str, Any] = yaml.safe_load((ROOT / "compose.gpu.yml").read_text())["services"]
PROMETHEUS: dict[str, Any] = yaml.safe_load((ROOT / "compose.prometheus.yml").read_text())["services"]["prometheus"]
SCRAPED: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "prometheus" / "containers.yml").read_text())
SETTINGS: dict[str, type[BaseSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "scheduler-2": SchedulerSettings,
    "worker-0": WorkerSettings,
    "worker-1": WorkerSettings,
}


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_can_neither_write_nor_rise(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_cannot_take_the_machine(name: str) -> None:
    service = SERVICES[name]
    assert service["pids_limit"] == 512
    assert re.fullmatch(r"\$\{\w+:-\d+g\}" if name != "redis" else r"\d+g", service["mem_limit"])
    assert all(re.fullmatch(r"/[\w/]+:size=.*\w\}?", mount) for mount in service["tmpfs"])


@pytest.mark.parametrize("name", SETTINGS)
def test_a_health_check_needs_no_package_and_asks_a_port_that_is_told_of(name: str) -> None:
    service = SERVICES[name]
    cmd, python, flags, script, target, *_ = service["healthcheck"]["test"]
    assert (cmd, python, flags, script) == ("CMD", "python", "-IS", "/app/protos/health.py")
    assert (ROOT / script.removeprefix("/app/")).exists()
    port = target.removeprefix("127.0.0.1:")
    told = [f"--health-port={port}" in service["command"], service["environment"].get("LAPS_SD_WORKER_HEALTH_PORT")]
    assert told in ([True, None], [False, port])


def test_every_folder_of_certificates_can_be_written_where_they_are_made() -> None:
    service = SERVICES["certs"]
    writable = {word.split(":")[1] for word in service["volumes"]} | {word.split(":")[0] for word in service["tmpfs"]}
    assert {f"/made/{name}" for name in ("ca", *PURPOSES)} <= writable
    assert service["command"][:3] == ["laps-sd", "certs", "/made"]


def test_images_have_no_folder_where_certificates_are_read() -> None:
    """Docker would fill the empty volumes from it, its owner with it, before `certs` has run."""
    assert not [line for line in DOCKERFILE.splitlines() if "/certs" in line and not line.startswith("#")]


def test_redis_refuses_before_its_container_is_full() -> None:
    redis = SERVICES["redis"]
    most = redis["command"][redis["command"].index("--maxmemory") + 1]
    assert int(most.removesuffix("mb")) < 1024 * int(redis["mem_limit"].removesuffix("g"))


def test_every_variable_of_the_compose_files_is_in_the_docs() -> None:
    files = [ROOT / name for name in ("docker-compose.yml", "compose.gpu.yml", "compose.prometheus.yml")]
    told = {name for file in files for name in re.findall(r"\$\{(\w+)", file.read_text())}
    page = (ROOT / "docs" / "how-to" / "containers.md").read_text()
    assert told
    assert {name for name in told if f"`{name}" not in page} == set()


def test_bases_are_pinned_alike_wherever_they_are_named() -> None:
    pinned = re.search(r"^ARG PYTHON_IMAGE=(\S+@sha256:[0-9a-f]{64})$", DOCKERFILE, re.M)
    assert pinned
    for service in SERVICES.values():
        if "build" in service:
            assert service["build"]["args"]["PYTHON_IMAGE"] == f"${{PYTHON_IMAGE:-{pinned[1]}}}"
            assert f"AS {service['build']['target']}\n" in DOCKERFILE
    assert "@sha256:" in SERVICES["redis"]["image"]


def test_what_gpus_need_is_put_over_services_that_there_are() -> None:
    assert {name for name in SERVICES if name.startswith("worker-")} == GPU.keys()


@pytest.mark.parametrize("name", GPU)
def test_a_worker_is_sized_by_its_gpu_unless_somebody_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(**said: str) -> WorkerSettings:
        for variable, value in (SERVICES[name]["environment"] | GPU[name]["environment"]).items():
            if variable.startswith("LAPS_SD_WORKER_"):
                word = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: said.get(found[1], found[2]), value)
                monkeypatch.setenv(variable, word)
        return CliApp.run(WorkerSettings, cli_args=[])

    assert not {"slots", "kv_tokens"} & read().model_fields_set
    told = read(SLOTS="8", KV_TOKENS="4096")
    assert (told.slots, told.kv_tokens) == (8, 4096)
    assert {"slots", "kv_tokens"} <= told.model_fields_set


def test_no_container_runs_as_root() -> None:
    assert SERVICES["redis"]["user"] == "redis"
    users = [line for line in DOCKERFILE.splitlines() if line.startswith("USER")]
    assert users == ["USER 10001"] * 3  # of all images


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_published_to_this_machine_alone_unless_somebody_says(name: str) -> None:
    """And then those for clients only."""
    for port in (*SERVICES[name].get("ports", []), *PROMETHEUS["ports"]):
        where = "${BIND:-127.0.0.1}:" if port.endswith((":50051", ":8080")) else "127.0.0.1:"
        assert port.startswith(where)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_services_authenticate(name: str, certs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they start in a container, its mounts in other places."""
    (certs / "keys").mkdir()
    (certs / "keys" / "api-keys").write_text(new_key("acme", [Right.GENERATE])[1])

    def here(word: str) -> str:
        word = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word)  # a variable's default
        return word.replace("/certs", str(certs / name.partition("-")[0])).replace("/keys", str(certs / "keys"))

    service = SERVICES[name]
    for variable, value in service["environment"].items():
        monkeypatch.setenv(variable, here(str(value)))
    settings: Any = CliApp.run(SETTINGS[name], cli_args=[here(word) for word in service["command"][3:]])
    assert settings.tls
    assert not settings.insecure
    assert settings.host == "0.0.0.0"


def test_prometheus_reads_every_service_and_has_its_own_certificate(certs: Path) -> None:
    targets = {at for job in SCRAPED["scrape_configs"] for some in job["static_configs"] for at in some["targets"]}
    assert targets == {f"{name}:9090" for name in SETTINGS}
    assert all("--metrics-port=9090" in SERVICES[name]["command"] for name in SETTINGS)
    assert [volume for volume in PROMETHEUS["volumes"] if ":/certs" in volume] == ["certs-prometheus:/certs:ro"]
    assert "certs-prometheus:/made/prometheus" in SERVICES["certs"]["volumes"]
    files = {path for job in SCRAPED["scrape_configs"] for key, path in job["tls_config"].items() if "_file" in key}
    assert {Path(path).name for path in files} == {file.name for file in (certs / "prometheus").iterdir()}


def test_no_service_has_anothers_certificate() -> None:
    mounts = {
        name: [mount for mount in service.get("volumes", []) if mount.startswith("certs-")]
        for name, service in SERVICES.items()
        if name != "certs"
    }
    for name, mounted in mounts.items():
        wanted = [f"certs-{name.partition('-')[0]}:/certs:ro"] if name != "model" else []
        assert mounted == wanted, name
