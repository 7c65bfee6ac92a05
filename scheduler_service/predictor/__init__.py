"""What a request is expected to need, learned from finished ones. Pure work: no wire, no store, no event loop."""

from enum import StrEnum
from importlib.util import find_spec

from scheduler_service.predictor.port import Predictor


class PredictorKind(StrEnum):
    NONE = "none"
    ONLINE = "online"


def installed() -> bool:
    """Whether there is what fitting needs."""
    return all(find_spec(name) is not None for name in ("scipy", "threadpoolctl"))


def lacks(kind: PredictorKind) -> str:
    """What to install for this predictor, as a sentence; empty if it is there."""
    if kind is PredictorKind.NONE or installed():
        return ""
    return f"{kind} needs the extra: pip install 'laps-sd[scheduler]', or choose {PredictorKind.NONE}"


def make_predictor(kind: PredictorKind) -> Predictor | None:
    """A cold one. Loaded only if it is asked for, since it brings numpy along."""
    if kind is PredictorKind.NONE:
        return None
    from scheduler_service.predictor.online import OnlinePredictor

    return OnlinePredictor()
