"""Which tables the pages of docs/reference have, and how they get into them."""

import re
from collections.abc import Callable
from pathlib import Path

from deploy.reference import http, settings
from deploy.reference.tables import code, table
from gateway.metrics import Metrics as OfGateway
from laps_sd.cli import BENCH_COMMANDS, COMMANDS, KEY_COMMANDS
from protos.metrics import Families
from scheduler_service.metrics import Metrics as OfScheduler
from worker_service.drafting.metrics import Metrics as OfDrafter
from worker_service.metrics import Metrics as OfWorker

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
_MADE = re.compile(r"(?<=<!-- made by `python -m deploy.reference`: )([\w-]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def services() -> dict[str, Families]:
    """What each service declares."""
    return {
        "gateway": OfGateway(),
        "scheduler": OfScheduler(lambda: None),
        "worker": OfWorker(),
        "drafter": OfDrafter(),
    }


def metrics() -> str:
    rows: dict[tuple[str, ...], list[str]] = {}
    for service, families in services().items():
        for row in families.table():
            rows.setdefault(row, []).append(service)
    return table(
        ("name", "type", "label", "service", "meaning"),
        (
            (code(name), kind, code(label), ", ".join(by), text)
            for (name, kind, label, text), by in sorted(rows.items())
        ),
    )


def commands() -> str:
    groups = {"": COMMANDS, "key ": KEY_COMMANDS, "bench ": BENCH_COMMANDS}
    return table(
        ("command", "what"),
        ((code(group + name), line) for group, found in groups.items() for name, (_, line) in found.items()),
    )


def calls(file: str) -> Callable[[], str]:
    """The calls of a .proto file, with the first sentence of what is said of them there."""
    call = re.compile(r"((?:^  //.*\n)+)  rpc (\w+)\((?:stream )?(\w+)\) returns \((stream )?(\w+)\)", re.MULTILINE)

    def make() -> str:
        found = call.findall((ROOT / file).read_text())
        said = (" ".join(line.strip().removeprefix("// ") for line in words.splitlines()) for words, *_ in found)
        first = (re.split(r"(?<=[.?]) (?=[A-Z])", words)[0] for words in said)
        return table(
            ("call", "answer", "what"),
            (
                (code(name), "stream" if stream else "one", words)
                for (_, name, _, stream, _), words in zip(found, first, strict=True)
            ),
        )

    return make


TABLES: dict[str, Callable[[], str]] = {
    "metrics": metrics,
    "up": settings.up,
    "common": settings.common,
    **{name: settings.of_service(name) for name in settings.SERVICES},
    "commands": commands,
    "inference": calls("protos/v1/inference.proto"),
    "open-inference": calls("protos/oip/inference.proto"),
    "paths": http.paths,
    "generating": http.generating,
    "responses": http.responses,
    "refused": http.refused,
    "accepted": http.accepted,
    "statuses": http.statuses,
}


def page(file: Path) -> str:
    """The page as it should be."""
    return _MADE.sub(lambda found: f"{found[1]}{found[2]}\n{TABLES[found[1]]()}\n", file.read_text())
