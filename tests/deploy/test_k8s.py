"""All that the manifests of deploy/k8s name exists in the code: commands, flags, variables, ports, services, files.
Whether Kubernetes takes them is asked in tests/k8s."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_settings import BaseSettings, CliApp

from gateway.app import SERVICE as GATEWAY_SERVICE
from gateway.config import Settings as GatewaySettings
from gateway.keys import Right, new_key
from laps_sd.authority import PURPOSES, make_certs
from scheduler_service.__main__ import SERVICES
from scheduler_service.config import Settings as SchedulerSettings
from scheduler_service.metrics import Metrics
from tests.deploy.manifests import K8S, ROOT, Pod, config_maps, environment, kustomizations, leaves, objects, pods
from worker_service.config import Settings as WorkerSettings
from worker_service.engine.parallel import _START_TIMEOUT

SETTINGS: dict[str, type[BaseSettings]] = {
    "gateway": GatewaySettings,
    "scheduler_service": SchedulerSettings,
    "worker_service": WorkerSettings,
}
HEALTH = {"gateway": GATEWAY_SERVICE, "worker_service": SERVICES[0]}
GOODBYE_S = 10
STARTED_S = 120  # until torchrun's processes have met, too
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
PODS = pods()
OURS = [pod for pod in PODS if pod.module in SETTINGS]
named = pytest.mark.parametrize("pod", OURS, ids=lambda pod: pod.name)
every = pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod.name)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every folder that a pod mounts a Secret on, as the docs say that Secrets are made."""
    folder = tmp_path_factory.mktemp("secrets")
    make_certs(folder / "certs")
    (folder / "keys").mkdir()
    (folder / "keys" / "api-keys").write_text(new_key("acme", [Right.GENERATE])[1])
    return folder


@pytest.fixture
def settings(secrets: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function: the settings that a pod's process reads."""

    def read(pod: Pod) -> Any:
        role = pod.labels["app.kubernetes.io/name"]

        def here(word: str) -> str:
            word = word.replace("/certs/", f"{secrets}/certs/{role}/").replace("/keys/", f"{secrets}/keys/")
            return word.replace("=/redis/", f"={secrets}/certs/scheduler/")

        for name, value in environment(pod.container).items():
            monkeypatch.setenv(name, here(value))
        return CliApp.run(SETTINGS[pod.module], cli_args=[here(word) for word in pod.flags])

    return read


@named
def test_a_service_takes_its_flags_and_variables_and_authenticates(pod: Pod, settings: Any) -> None:
    read = settings(pod)
    assert read.tls
    assert not read.insecure
    assert read.health_host == "0.0.0.0"


@every
def test_a_command_exists(pod: Pod) -> None:
    assert pod.container["command"][0] in ("python", "redis-server")
    assert not pod.module or find_spec(pod.module) is not None


def test_a_variable_of_ours_is_a_setting() -> None:
    prefixes = {kind.model_config["env_prefix"]: kind for kind in SETTINGS.values()}
    for name in [name for literals in config_maps().values() for name in literals]:
        found = [
            kind for prefix, kind in prefixes.items() if name.removeprefix(str(prefix)).lower() in kind.model_fields
        ]
        assert name == "MODEL" or found, name


@named
def test_ports_are_those_that_the_service_binds(pod: Pod, settings: Any) -> None:
    read = settings(pod)
    bound = {
        getattr(read, name)
        for name in ("port", "grpc_port", "http_port", "admin_port", "metrics_port", "health_port")
        if getattr(read, name, None)
    }
    assert {port["containerPort"] for port in pod.container["ports"]} == bound


@named
def test_a_probe_asks_the_health_port_for_a_service_that_it_tells_of(pod: Pod, settings: Any) -> None:
    read = settings(pod)
    probes = {
        kind: pod.container[kind]["grpc"]
        for kind in ("startupProbe", "livenessProbe", "readinessProbe")
        if kind in pod.container
    }
    assert all(probe["port"] == read.health_port for probe in probes.values())
    if not probes:
        assert pod.container["command"][-1] == "torch.distributed.run"  # those that follow another
        return
    assert "service" not in probes["livenessProbe"]  # whoever waits for others lives
    assert probes["readinessProbe"].get("service") == HEALTH.get(pod.module)


def test_the_first_of_a_group_may_wait_for_the_others_as_long_as_torch_does() -> None:
    """Torchrun first, and then its processes."""
    words = [word for pod in OURS for word in pod.container.get("args", ()) if word.startswith("--rdzv-conf=")]
    meeting_s = _START_TIMEOUT.total_seconds()
    assert words == [f"--rdzv-conf=timeout={meeting_s:.0f}"] * 2
    probes = [pod.container["startupProbe"] for pod in OURS if "startupProbe" in pod.container]
    (waited_s,) = [probe["periodSeconds"] * probe["failureThreshold"] for probe in probes]
    assert waited_s >= meeting_s + STARTED_S


def test_who_waits_for_a_model_to_load_has_the_same_time() -> None:
    waited = {
        each["metadata"]["name"]: each["spec"]["progressDeadlineSeconds"]
        for each in objects()
        if each["kind"] == "Deployment"
    }
    assert waited == {"gateway": 1800, "worker": 1800}


@named
def test_a_worker_is_sized_by_its_gpu_unless_somebody_says(pod: Pod, settings: Any) -> None:
    assert not {"slots", "kv_tokens"} & settings(pod).model_fields_set


@named
def test_there_is_time_for_the_drain(pod: Pod, settings: Any) -> None:
    """Before it, traffic is led elsewhere; after it, goodbyes are said."""
    before_s = pod.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    drain_s = getattr(settings(pod), "drain_s", 0)
    assert pod.spec["terminationGracePeriodSeconds"] >= before_s + drain_s + GOODBYE_S


@every
def test_a_container_can_neither_write_nor_rise(pod: Pod) -> None:
    assert pod.container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod.spec["securityContext"]["runAsNonRoot"] is True
    assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod.spec["automountServiceAccountToken"] is False


@every
def test_no_service_of_the_cluster_can_pass_for_a_setting(pod: Pod) -> None:
    """A Service named like one of ours would set variables with our prefix."""
    assert pod.spec["enableServiceLinks"] is False


@every
def test_a_file_that_is_named_is_mounted(pod: Pod) -> None:
    mounts = {mount["mountPath"]: mount["name"] for mount in pod.container["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in pod.spec["volumes"]} | (
        {"data"} if pod.name == "redis" else set()
    )
    words = [*pod.container.get("args", []), *environment(pod.container).values()]
    files = [found[0] for word in words if (found := re.search(r"(?:^|(?<==))/[\w./-]+$", word))]
    assert files or pod.name == "model"
    assert [file for file in files if not any(file == path or file.startswith(f"{path}/") for path in mounts)] == []


def test_certificates_are_for_what_ours_are_for() -> None:
    made = {
        each["spec"]["secretName"].removeprefix("laps-sd-"): each["spec"]
        for each in objects()
        if each["kind"] == "Certificate"
    }
    names = {oid.dotted_string: name for oid, name in ((p, p._name) for ps in PURPOSES.values() for p in ps)}
    words = {"serverAuth": "server auth", "clientAuth": "client auth"}
    assert PURPOSES.keys() - made.keys() == {"drafter"}  # no manifest starts one
    for role, purposes in ((role, PURPOSES[role]) for role in PURPOSES.keys() & made.keys()):
        usages = {words[names[purpose.dotted_string]] for purpose in purposes}
        assert set(made[role]["usages"]) - {"digital signature"} == usages, role
        assert made[role]["dnsNames"][0] == role
    addresses = (K8S / "components" / "pair" / "kustomization.yaml").read_text()
    dialled = set(re.findall(r"(scheduler-\d\.scheduler):50052", addresses))
    assert len(dialled) == 2
    assert dialled <= set(made["scheduler"]["dnsNames"])


def test_images_are_those_that_compose_builds() -> None:
    built = {service["image"] for service in COMPOSE.values() if "build" in service}
    base, *_ = kustomizations()
    assert {f"{image['name']}:{image['newTag']}" for image in base["images"]} == built
    assert {pod.container["image"] for pod in PODS} - {"redis"} == {image["name"] for image in base["images"]}


def test_redis_starts_as_in_compose() -> None:
    (redis,) = [pod for pod in PODS if pod.name == "redis"]
    words = [word.replace("/acl/", "/certs/") for word in [*redis.container["command"], *redis.container["args"]]]
    assert words == [*COMPOSE["redis"]["command"], "--dir", "/data"]
    digests = [image.get("digest", "") for each in kustomizations() for image in each.get("images", [])]
    assert COMPOSE["redis"]["image"].rstrip("}").partition("@")[2] in digests


def test_redis_lives_while_it_answers_over_tls() -> None:
    (redis,) = [pod.container for pod in PODS if pod.name == "redis"]
    live = redis["livenessProbe"]
    assert live["exec"] == redis["readinessProbe"]["exec"]
    assert (live["periodSeconds"], live["failureThreshold"]) == (30, 6)


def test_kustomize_knows_where_a_group_names_config_maps() -> None:
    folder = K8S / "components" / "lws"
    assert yaml.safe_load((folder / "kustomization.yaml").read_text())["configurations"] == ["names.yaml"]
    (known,) = yaml.safe_load((folder / "names.yaml").read_text())["nameReference"]
    (group,) = [each for each in objects() if each["kind"] == "LeaderWorkerSet"]
    named = {path for path, name in leaves(group) if name in config_maps()}
    assert {spec["path"] for spec in known["fieldSpecs"]} == named
    assert {known["kind"], *(spec["kind"] for spec in known["fieldSpecs"])} == {"ConfigMap", group["kind"]}


def test_whoever_selects_pods_finds_some() -> None:
    for each in objects():
        spec = each["spec"]
        selector = spec.get("selector") or spec.get("podSelector") or {}
        wanted = selector.get("matchLabels", selector if each["kind"] == "Service" else None)
        if wanted and "leaderworkerset.sigs.k8s.io/name" not in wanted:
            assert any(wanted.items() <= pod.labels.items() for pod in PODS), each["metadata"]["name"]
        for expression in selector.get("matchExpressions", []):
            assert set(expression["values"]) <= {pod.labels.get(expression["key"]) for pod in PODS}


def test_networks_are_open_for_ports_that_somebody_binds() -> None:
    bound = {port["containerPort"] for pod in PODS for port in pod.container.get("ports", [])}
    others = {53, 80, 443}  # names; indexes of models
    for each in objects():
        rules = [*each["spec"].get("ingress", []), *each["spec"].get("egress", [])]
        assert {port["port"] for rule in rules for port in rule.get("ports", [])} <= bound | others
        if each["kind"] == "Service":
            assert {port["port"] for port in each["spec"]["ports"]} <= bound


def test_the_autoscaler_asks_for_metrics_that_there_are() -> None:
    names = {name for name, *_ in Metrics(lambda: None, "laps_sd_").table()}
    (scaled,) = [each for each in objects() if each["kind"] == "ScaledObject"]
    asked = [
        name for each in scaled["spec"]["triggers"] for name in re.findall(r"laps_sd_\w+", each["metadata"]["query"])
    ]
    assert len(asked) == 13
    assert set(asked) <= names


def test_workers_are_asked_for_by_the_share_of_requests_that_wait() -> None:
    (scaled,) = [each for each in objects() if each["kind"] == "ScaledObject"]
    query = scaled["spec"]["triggers"][0]["metadata"]["query"].partition(" or ")[0]

    def value(**requests: int) -> float:
        """Of the query, where two workers need ten seconds for all that is live."""
        known = {"backlog_seconds": 10} | {f"num_requests_{name}_by_class": n for name, n in requests.items()}
        words = query.replace("max(laps_sd_workers)", "2")  # all others leave out class batch, which may wait
        words = re.sub(r"(?:sum|max)\(laps_sd_(\w+)\{class!=\"batch\"\}\)", lambda found: str(known[found[1]]), words)
        return float(eval(words, {"clamp_min": max}))

    assert value(waiting=0, paused=0, running=8) == 0
    assert value(waiting=0, paused=0, running=0) == 0
    assert value(waiting=4, paused=2, running=2) == 15
    assert value(waiting=8, paused=0, running=0) == 20


def test_a_node_can_be_drained_as_the_runbook_says() -> None:
    """kubectl takes pods with an emptyDir away only if it is told so."""
    drains = [line for line in (ROOT / "docs/how-to/runbook.md").read_text().splitlines() if "kubectl drain" in line]
    assert drains
    assert all("--ignore-daemonsets --delete-emptydir-data" in line for line in drains)
