"""What the event log of a live scheduler says of requests and steps, as jobs and step costs that a simulation takes.
Reads; simulates nothing."""

import bisect
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from scheduler_service.core.beliefs import Expected
from scheduler_service.sim.costs import StepCosts

_EXPECTED: TypeAdapter[Expected | None] = TypeAdapter(Expected | None)


class Shape(NamedTuple):
    """What the time of a step depends on: `drafts`, the longest draft of its `batch` requests, and over all of them the
    tokens verified and prefilled, and how many went on after a pause."""

    drafts: int
    batch: int
    verified: int
    prefilled: int
    resumed: int


@dataclass(slots=True)
class Seen:
    """One request. `drafted` and `accepted`: of each round that emitted tokens. Times are of the scheduler's clock."""

    max_tokens: int
    expected: Expected | None
    output_tokens: int = 0
    arrived_s: float = 0.0
    ended_s: float = 0.0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    placement: int = 0  # under which its rows count, once a plan has named it


@dataclass(slots=True)
class Recording:
    """`timeline`: of each step its shape, when it was reported and how long it took. `kv_tokens`: of the worker's
    memory. `lost_s`: when the worker died, or its connection."""

    requests: dict[str, Seen] = field(default_factory=dict)
    timeline: list[tuple[Shape, float, float]] = field(default_factory=list)
    kv_tokens: int = 0
    lost_s: list[float] = field(default_factory=list)

    def steps(self) -> list[list[float]]:
        """Rows of a shape's numbers, how many steps had it, and their seconds in all: what `fitted` takes."""
        counts: Counter[Shape] = Counter()
        seconds: defaultdict[Shape, float] = defaultdict(float)
        for shape, _, took_s in self.timeline:
            counts[shape] += 1
            seconds[shape] += took_s
        return [[*shape, count, round(seconds[shape], 6)] for shape, count in sorted(counts.items())]

    def steadily(self, costs: StepCosts) -> dict[str, tuple[float, float]]:
        """Arrival and latency of each request that ended, as on a machine whose steps always take what `costs` say:
        time passes by steps, and between them as it did. What the machine's slow moments did to latencies is gone."""
        walls, steady = [-math.inf], [0.0]
        for shape, reported_s, took_s in self.timeline:
            began_s = max(walls[-1], reported_s - took_s)
            idle_s = began_s - walls[-1] if len(walls) > 1 else 0.0
            walls += [began_s, max(began_s, reported_s)]
            steady += [steady[-1] + idle_s, steady[-1] + idle_s + costs.step_s(*shape)]

        def moved(wall_s: float) -> float:
            after = bisect.bisect_left(walls, wall_s)
            if after == len(walls) or math.isinf(walls[after - 1]):  # beside all steps
                near = min(after, len(walls) - 1)
                return steady[near] + wall_s - walls[near]
            share = (wall_s - walls[after - 1]) / max(walls[after] - walls[after - 1], 1e-9)
            return steady[after - 1] + share * (steady[after] - steady[after - 1])

        ended = {id: seen for id, seen in self.requests.items() if seen.ended_s}
        return {id: (moved(seen.arrived_s), moved(seen.ended_s) - moved(seen.arrived_s)) for id, seen in ended.items()}


def read_events(path: Path) -> Recording:
    """Of a log of one scheduler's life with one worker. A line that was cut short is left out, with what a scheduler
    that was started again wrote behind it."""
    recording = Recording()
    ran: set[str] = set()
    up = False
    for line in _lines(path):
        if "plan" in line:
            _planned(recording, line["plan"])
            continue
        if "event" not in line:
            continue
        now, kind, event = line["now"], line["kind"], line["event"]
        if kind == "Submitted":
            request = event["request"]
            seen = Seen(request["max_tokens"], _EXPECTED.validate_python(request["expected"]), arrived_s=now)
            recording.requests[request["id"]] = seen
        elif kind == "WorkerUp":
            if up:  # another connection took its place
                recording.lost_s.append(now)
            recording.kv_tokens, up = event["blocks"] * event["block_tokens"], True
        elif kind == "WorkerDown":
            up = False
            if event["died"]:
                recording.lost_s.append(now)
        elif kind == "StepDone":
            ran = _step(recording, now, event, ran)
    return recording


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open() as lines:
        for line in lines:
            with suppress(ValueError):
                yield json.loads(line)


def _planned(recording: Recording, plan: Mapping[str, Any]) -> None:
    """What a plan gives away (`Core.plan`) makes the rows of the round in hand stale."""
    requests = recording.requests
    for run in plan["schedule"]:
        if run["id"] in requests:
            requests[run["id"]].placement = run["placement"]
    for id in (*plan["drop"], *plan["offload"]):
        if id in requests:
            requests[id].placement += 1


def _step(recording: Recording, now: float, event: Mapping[str, Any], ran_before: set[str]) -> set[str]:
    """The requests that ran."""
    rows = [row for row in event["rounds"] if not row["skipped"]]
    resumed = 0
    for row in rows:
        seen = recording.requests.get(row["id"])
        if seen is None or row["start"] != seen.output_tokens or row["placement"] < seen.placement:
            continue  # not of this log, or stale
        resumed += bool(seen.drafted) and not row["prefilled"] and row["id"] not in ran_before
        if row["new"]:
            seen.output_tokens += row["new"]
            seen.drafted.append(row["drafted"])
            seen.accepted.append(row["accepted"])
        if row["finish"]:
            seen.ended_s = now
    if rows:
        shape = Shape(
            drafts=max(row["drafted"] for row in rows),
            batch=len(rows),
            verified=sum(row["drafted"] + 1 for row in rows if row["new"]),
            prefilled=sum(row["prefilled"] for row in rows),
            resumed=resumed,
        )
        recording.timeline.append((shape, now, event["duration_s"]))
    return {row["id"] for row in rows}


def fitted(steps: Iterable[Sequence[float]]) -> StepCosts:
    """The costs, none negative, that come nearest to the steps' times in least squares: their sum is that of the steps.

    `steps` as `Recording.steps` has them, of one run or several. Raises ValueError if there are none.
    """
    import numpy as np
    from scipy.optimize import nnls

    rows = np.array(list(steps), dtype=float)
    if not len(rows):
        raise ValueError("no steps to learn costs from")
    drafts, batch, verified, prefilled, resumed, counts, seconds = rows.T
    causes = np.stack([np.ones_like(batch), batch - 1, verified, prefilled, resumed, drafts], axis=1)
    weights = np.sqrt(counts)
    solution, _ = nnls(causes * weights[:, None], seconds / counts * weights)
    verify, slope, token, prefill, resume, draft = (1e3 * solution).tolist()
    return StepCosts(
        t_draft_ms=draft,
        t_verify_ms=max(verify, 1e-3),
        t_verify_slope=slope / max(verify, 1e-3),
        t_token_ms=token,
        t_prefill_ms_per_token=prefill,
        t_resume_ms=resume,
    )


def explained_lengths(expected: Iterable[tuple[Expected | None, int, int]]) -> float:
    """Share of the variance of ln(output tokens) that the expected medians explain, in (-inf, 1], given what is
    expected, the tokens, and the bound on them; a request without an expectation counts as expected at the mean."""
    pairs = [
        (min(each.length.location, math.log(most)) if each and each.length else None, math.log(tokens))
        for each, tokens, most in expected
    ]
    if not pairs:
        return 0.0
    mean = math.fsum(true for _, true in pairs) / len(pairs)
    total = math.fsum((true - mean) ** 2 for _, true in pairs)
    left = math.fsum((true - (mean if known is None else known)) ** 2 for known, true in pairs)
    return 1 - left / total if total else 0.0
