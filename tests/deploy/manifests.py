"""Reads deploy/k8s as plain YAML: whatever a manifest or a component says. Rendering is kustomize's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy" / "k8s"
CORES = "2"  # where a manifest asks for the number that a container may have


class Pod(NamedTuple):
    name: str
    spec: dict[str, Any]
    labels: dict[str, str]
    container: dict[str, Any]

    @property
    def module(self) -> str:
        """Of Python that it runs; empty if none."""
        words = [*self.container["command"], *self.container.get("args", [])]
        if "torch.distributed.run" in words:
            return str(words[words.index("--module") + 1])
        return str(words[2]) if words[:2] == ["python", "-m"] else ""

    @property
    def flags(self) -> list[str]:
        """Of that module."""
        words = self.container.get("args", [])
        return words[words.index("--module") + 2 :] if "--module" in words else words


def objects() -> Iterator[dict[str, Any]]:
    for file in sorted(K8S.rglob("*.yaml")):
        if file.name not in ("kustomization.yaml", "names.yaml"):
            yield from filter(None, yaml.safe_load_all(file.read_text()))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """With their paths, as kustomize writes them: a list's elements have that of the list."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from leaves(each, f"{path}/{name}" if path else name)
    elif isinstance(value, list):
        for each in value:
            yield from leaves(each, path)
    else:
        yield path, value


def kustomizations() -> list[dict[str, Any]]:
    """The base's first, then those of the components."""
    files = [K8S / "base" / "kustomization.yaml", *sorted(K8S.glob("components/*/kustomization.yaml"))]
    return [yaml.safe_load(file.read_text()) for file in files]


def pods() -> list[Pod]:
    found = []
    for each in objects():
        spec = each.get("spec", {})
        group = spec.get("leaderWorkerTemplate", {})
        templates = (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate"))
        for template in filter(None, templates):
            pod, labels = template["spec"], template["metadata"]["labels"]
            found += [Pod(each["metadata"]["name"], pod, labels, container) for container in pod["containers"]]
    return found


def config_maps() -> dict[str, dict[str, str]]:
    """By name, with what components add: the base's values where a component has others."""
    maps: dict[str, dict[str, str]] = {}
    for kustomization in reversed(kustomizations()):
        for each in kustomization.get("configMapGenerator", []):
            literals = dict(literal.split("=", 1) for literal in each["literals"])
            maps.setdefault(each["name"], {}).update(literals)
    return maps


def environment(container: dict[str, Any]) -> dict[str, str]:
    maps, found = config_maps(), dict[str, str]()
    for source in container.get("envFrom", []):
        if "configMapRef" in source:
            found |= maps[source["configMapRef"]["name"]]
    for each in container.get("env", []):
        found[each["name"]] = each.get("value", CORES)
    return found
