"""Which versions of the links between our services this code speaks, and what a side is told that speaks none of them.
No transport.

Version 1 had the links in the public package, laps_sd.v1. Version 2 has them in laps_sd.link.v1, so that a scheduler of
one version does not know the calls of the other; protos/former.py answers those of version 1. From version 3 on a
worker leaves its tokenizer out of its greeting.
"""

from collections.abc import Iterable

import grpc

from protos.errors import BadInput, Incompatible

CURRENT = 3
LEAST = 2  # a peer whose newest version is older is refused
TOKENIZER_ASKED_FOR = 3  # the first in which a scheduler asks for the tokenizer, if no worker has brought it yet
KEY = "laps-sd-protocol"  # metadata of a gateway's link: LEAST-CURRENT

LOAD_KEY = "laps-sd-load"  # metadata of a gateway's link: it chooses between cells, and is told their load
MODEL_KEY = "laps-sd-model"  # the same: the digest (protos/models.py) of the model that it has, so need not be sent
METADATA = ((KEY, f"{LEAST}-{CURRENT}"),)


def agree(least: int, current: int, peer: str) -> int:
    """The newest version that both sides speak: the peer speaks `least` to `current`. Raises Incompatible, which says
    whether the `peer` (worker or gateway) or the scheduler must be upgraded. Fields and messages that are newer than
    the agreed version are not seen by the older side."""
    if max(least, LEAST) <= min(current, CURRENT):
        return min(current, CURRENT)
    older = peer if current < LEAST else "scheduler"
    theirs, ours = _span(least, current), _span(LEAST, CURRENT)
    raise Incompatible(f"the {peer} speaks {theirs}, the scheduler {ours}: upgrade the {older}")


def of_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[int, int]:
    """The oldest and the newest version that a gateway speaks, from the metadata of its link; without any it is version
    1. Raises BadInput."""
    value = dict(metadata or ()).get(KEY, "1-1")
    try:
        least, current = map(int, str(value).split("-"))
    except ValueError:
        raise BadInput("protocol", f"{value!r} is no span of versions") from None
    return least, current


def reason(error: grpc.RpcError, peer: str) -> str:
    """Why the scheduler ended a link of the `peer` (worker or gateway), for its log. Who does not know the call is a
    scheduler of version 1, or none: gateways have ports, too."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        ours = _span(LEAST, CURRENT)
        return f"no scheduler of {ours}, which the {peer} speaks, is at that port: upgrade it, or name another port"
    return f"{error.code().name}: {error.details()}"


def _span(least: int, current: int) -> str:
    return f"version {current}" if least == current else f"versions {least} to {current}"
