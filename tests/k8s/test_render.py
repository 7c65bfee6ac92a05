"""Every component renders, alone and with the others, and what comes out is valid to the last field, where there is a
schema for its kind."""

import itertools
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.manifests import leaves
from tests.k8s.kubectl import ROOT, render

K8S = ROOT / "deploy" / "k8s"
COMPONENTS = sorted(folder.name for folder in (K8S / "components").iterdir())
VERSION = "1.37"
# Kinds of others, which come with definitions of their own: no schema of theirs is here, so they are not checked.
UNCHECKED = {
    ("cert-manager.io/v1", "Certificate"),
    ("cert-manager.io/v1", "Issuer"),
    ("keda.sh/v1alpha1", "ScaledObject"),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"),
    ("monitoring.coreos.com/v1", "PodMonitor"),
}
APART = ({"gpu", "lws"},)  # the former changes the Deployment that the other takes away


def choices() -> list[tuple[str, ...]]:
    alone = [(), *((name,) for name in COMPONENTS)]
    pairs = [pair for pair in itertools.combinations(COMPONENTS, 2) if set(pair) not in APART]
    without = [tuple(name for name in COMPONENTS if name != other) for other in ("gpu", "lws")]
    return [*alone, *pairs, *without]


def rendered(folder: Path, components: tuple[str, ...]) -> list[dict[str, Any]]:
    (folder / "k8s").symlink_to(K8S)
    wanted = {
        "namespace": "laps-sd",
        "resources": ["k8s/base"],
        "components": [f"k8s/components/{name}" for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(wanted))
    return list(yaml.safe_load_all(render(folder)))


def valid(objects: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """Returns the kinds that have no schema. Raises ValidationError."""
    unknown = set()
    for each in objects:
        kind = (each["apiVersion"], each["kind"])
        if kind in UNCHECKED:
            unknown.add(kind)
        else:
            kubernetes_validate.validate(each, VERSION, strict=True)
    return unknown


@pytest.mark.parametrize("components", choices(), ids=lambda names: "+".join(names) or "base")
def test_it_renders_and_is_valid(components: tuple[str, ...], tmp_path: Path) -> None:
    objects = rendered(tmp_path, components)
    valid(objects)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))
    assert all(each["metadata"]["namespace"] == "laps-sd" for each in objects)


def test_the_example_is_valid() -> None:
    assert valid(list(yaml.safe_load_all(render(K8S / "example")))) == {
        ("cert-manager.io/v1", "Certificate"),
        ("cert-manager.io/v1", "Issuer"),
    }


def test_what_the_page_says_to_add_renders(tmp_path: Path) -> None:
    """All of it in one file."""
    page = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
    wanted: dict[str, Any] = {}
    for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL):
        for key, value in yaml.safe_load(block).items():
            wanted[key] = wanted[key] + value if key in wanted else value
    (tmp_path / "k8s").symlink_to(K8S)
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(wanted | {"resources": ["k8s/example"]}))
    objects = list(yaml.safe_load_all(render(tmp_path)))
    valid(objects)
    named = {(each["kind"], each["metadata"]["name"].partition("-model-")[0]): each for each in objects}
    assert named["Service", "gateway"]["spec"]["type"] == "LoadBalancer"
    assert named["Certificate", "laps-sd-gateway"]["spec"]["dnsNames"][-1] == "llm.example.com"
    worker = named["Deployment", "worker"]["spec"]
    assert worker["strategy"] == {"type": "Recreate"}
    (container,) = worker["template"]["spec"]["containers"]
    assert container["image"].startswith("REGISTRY/worker:")
    assert container["resources"]["limits"]["memory"] == "16Gi"
    data = named["ConfigMap", "laps-sd"]["data"]
    assert data["MODEL"] == data["LAPS_SD_WORKER_MODEL"] == "OWNER/NAME"


def test_a_misspelt_field_is_not_valid(tmp_path: Path) -> None:
    objects = rendered(tmp_path, ())
    worker = next(each for each in objects if (each["kind"], each["metadata"]["name"]) == ("Deployment", "worker"))
    worker["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        valid(objects)


@pytest.mark.parametrize(("components", "kind"), [(("keda",), "Deployment"), (("keda", "lws"), "LeaderWorkerSet")])
def test_what_keda_scales_is_there(components: tuple[str, ...], kind: str, tmp_path: Path) -> None:
    objects = rendered(tmp_path, components)
    scaled = next(each for each in objects if each["kind"] == "ScaledObject")["spec"]["scaleTargetRef"]
    version = scaled.get("apiVersion", "apps/v1")
    assert scaled.get("kind", "Deployment") == kind  # KEDA's default
    assert (version, kind, scaled["name"]) in {(o["apiVersion"], o["kind"], o["metadata"]["name"]) for o in objects}


@pytest.mark.parametrize("components", [("keda",), ("keda", "lws")])
def test_how_many_workers_there_are_is_kedas(components: tuple[str, ...], tmp_path: Path) -> None:
    """A manifest that is applied again ends none of those that it has started."""
    for each in rendered(tmp_path, components):
        if each["kind"] in ("Deployment", "LeaderWorkerSet") and each["metadata"]["name"] == "worker":
            assert "replicas" not in each["spec"]


def test_keda_takes_a_prometheus_without_an_answer_for_an_error(tmp_path: Path) -> None:
    """Not for zero. Then there stay as many workers as there are: a fallback is a number, and would end busy ones."""
    spec = next(each for each in rendered(tmp_path, ("keda",)) if each["kind"] == "ScaledObject")["spec"]
    assert "fallback" not in spec
    for trigger in spec["triggers"]:
        assert trigger["metadata"]["ignoreNullValues"] == "false"
        assert trigger["metadata"]["query"].endswith(" or vector(0) and on() max(laps_sd_leads) == 1")


def test_full_slots_ask_keda_for_no_more_workers_than_there_are(tmp_path: Path) -> None:
    spec = next(each for each in rendered(tmp_path, ("keda",)) if each["kind"] == "ScaledObject")["spec"]
    busy = spec["triggers"][1]["metadata"]
    staying = r"\(max\(laps_sd_workers\) - max\(laps_sd_workers_draining\)\)"
    assert re.match(rf"clamp_max\(.*, 1\) \* {staying} or ", busy["query"])
    assert busy["threshold"] == "1"


@pytest.mark.parametrize("components", [(), ("lws",), tuple(name for name in COMPONENTS if name != "gpu")])
def test_a_config_map_that_is_named_is_there(components: tuple[str, ...], tmp_path: Path) -> None:
    objects = rendered(tmp_path, components)
    there = {each["metadata"]["name"] for each in objects if each["kind"] == "ConfigMap"}
    named = {name for path, name in leaves(objects) if path.endswith("/configMapRef/name")}
    assert len(named) == 3
    assert named <= there


def test_a_group_of_pods_reaches_names_and_the_scheduler_by_its_own_policy(tmp_path: Path) -> None:
    policy = next(each for each in rendered(tmp_path, ("lws",)) if each["kind"] == "NetworkPolicy")
    ports = [port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", [])]
    assert ports == [53, 53, 50052]


def test_a_pair_is_two_schedulers_that_everybody_knows(tmp_path: Path) -> None:
    objects = rendered(tmp_path, ("pair",))
    scheduler = next(each for each in objects if each["kind"] == "StatefulSet")
    links = next(each for each in objects if each["metadata"]["name"].startswith("laps-sd-links"))
    assert scheduler["spec"]["replicas"] == 2
    for value in links["data"].values():
        assert value == "scheduler-0.scheduler:50052,scheduler-1.scheduler:50052"
