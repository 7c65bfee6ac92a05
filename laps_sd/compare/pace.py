"""A machine that is equally fast all along, in the simulator's terms: what steps cost on it, told to workers, and how
late the real one was. Runs nothing."""

import json
import math
from dataclasses import asdict

from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.recording import Recording

NAMES = ("t_verify_ms", "t_verify_slope", "t_token_ms", "t_draft_ms", "t_prefill_ms_per_token")
# A step that is later than both: the machine was too slow for its pace. The second is a share of the mean latency.
MOST_LATE_S, MOST_LATE_SHARE = 1.0, 0.03
LEAST_WAIT_S = 0.02  # between two steps; a shorter gap may be a report that came late


def pace_of(text: str) -> StepCosts:
    """`t_verify_ms=13,t_token_ms=0.2`; what is not named costs nothing. Raises ValueError."""
    pairs = dict(part.partition("=")[::2] for part in text.split(","))
    costs = {name: _number(name, text) for name, text in pairs.items()}
    if not costs.get("t_verify_ms"):
        raise ValueError("a pace needs t_verify_ms: what a step of one request takes")
    return StepCosts(**(dict.fromkeys(asdict(StepCosts()), 0.0) | costs))


def _number(name: str, text: str) -> float:
    if name not in NAMES:
        raise ValueError(f"{name!r} is none of {', '.join(NAMES)}")
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{name}={text}: is no number that is finite and not negative")
    return number


def for_worker(pace: StepCosts) -> str:
    """As the flag of a worker."""
    profile = asdict(pace.profile())
    names = ("draft_s", "verify_s", "verify_slope_s", "prefill_token_s", "verify_token_s")
    return json.dumps({name: profile[name] for name in names})


def latest_s(pace: StepCosts, recording: Recording, since_s: float = 0.0) -> float:
    """By how much a step that began after `since_s` ended later than at this pace, at worst. Late steps make those that
    follow late, until faster ones make up for it or the worker waits: then the pace's device had waited, too."""
    late_s = worst_s = ended_s = 0.0
    for shape, reported_s, took_s in recording.timeline:
        began_s = reported_s - took_s
        if began_s > ended_s + LEAST_WAIT_S:
            late_s = 0.0
        else:  # reports are a little late, now more and now less: it began where the one before it ended
            began_s = ended_s
        late_s = max(0.0, late_s) + took_s - pace.step_s(*shape)
        ended_s = began_s + took_s
        if began_s >= since_s:
            worst_s = max(worst_s, late_s)
    return worst_s
