"""`python deploy/metrics_page.py`: writes the table of metrics into docs/metrics.md, from what the services declare.
A test fails while the two differ."""

import re
from pathlib import Path

from gateway.metrics import Metrics as OfGateway
from protos.metrics import Families
from scheduler_service.metrics import Metrics as OfScheduler
from worker_service.metrics import Metrics as OfWorker

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
TABLE = re.compile(r"(?<=<!-- made by `python deploy/metrics_page.py` -->\n).*?(?=<!-- end -->)", re.DOTALL)


def services() -> dict[str, Families]:
    """What each service declares."""
    return {"gateway": OfGateway(), "scheduler": OfScheduler(lambda: None), "worker": OfWorker(blocks=1)}


def table() -> str:
    rows: dict[tuple[str, ...], list[str]] = {}
    for service, families in services().items():
        for row in families.table():
            rows.setdefault(row, []).append(service)
    lines = ["| name | type | label | service | meaning |", "|---|---|---|---|---|"]
    for (name, kind, label, text), by in sorted(rows.items()):
        lines.append(f"| `{name}` | {kind} | {f'`{label}`' if label else ''} | {', '.join(by)} | {text} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page as it should be."""
    return TABLE.sub(lambda _: table(), PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
