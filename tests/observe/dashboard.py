"""The dashboard that comes with LAPS-SD, as Grafana reads it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "laps-sd.json"
NAME = re.compile(r"\b(?:laps_sd|process)_[a-z0-9_]+")


def expressions() -> Iterator[tuple[str, str]]:
    """Each panel's title with each of its expressions."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def concrete(expression: str, interval: str) -> str:
    """The expression with Grafana's variables filled in."""
    return expression.replace("$__rate_interval", interval)
