"""Which versions of the links between our services this code speaks, and what two sides agree on. No transport."""

from collections.abc import Iterable

from protos.errors import BadInput

CURRENT = 1
LEAST = 1  # peers that speak none from here on are refused
KEY = "laps-sd-protocol"  # metadata of a gateway's link: LEAST-CURRENT

METADATA = ((KEY, f"{LEAST}-{CURRENT}"),)


def agree(least: int, current: int, peer: str) -> int:
    """The newest version that both sides speak; `peer` says who the other one is. Raises BadInput: who is to be
    upgraded. What a newer side can beyond that is in fields and messages that the older one does not see."""
    if max(least, LEAST) <= min(current, CURRENT):
        return min(current, CURRENT)
    older = peer if current < LEAST else "scheduler"
    theirs, ours = _span(least, current), _span(LEAST, CURRENT)
    raise BadInput("protocol", f"the {peer} speaks {theirs}, the scheduler {ours}: upgrade the {older}")


def of_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[int, int]:
    """The span that a gateway's link came with; version 1 said nothing of it. Raises BadInput."""
    value = dict(metadata or ()).get(KEY, "1-1")
    try:
        least, current = map(int, str(value).split("-"))
    except ValueError:
        raise BadInput("protocol", f"{value!r} is no span of versions") from None
    return least, current


def _span(least: int, current: int) -> str:
    return f"version {current}" if least == current else f"versions {least} to {current}"
