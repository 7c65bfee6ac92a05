"""The figures of a comparison, cell by cell: measured, simulated, with confidence intervals. Prints nothing."""

import json
import math
import statistics as means
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from laps_sd.compare import replay
from laps_sd.compare.design import BASE, BURST, Cell, Run
from laps_sd.compare.statistics import Latencies, by_kind, quantiles_ms, ratio, times_ms
from scheduler_service.sim.results import is_good

OURS = "gittins"
# How far the simulator's ratio and mean may be from the live ones, and for which share of the time the model may idle.
RATIO_WITHIN, MEAN_WITHIN, MOST_IDLE = 0.10, 0.20, 0.02

Found = dict[str, Any]  # a run as the folder keeps it
Runs = Mapping[int, Found]  # of one policy in one cell, by repetition


def summarise(found: Iterable[Found], draft_len: int, *, faulty: bool = False) -> dict[str, Any]:
    """`cells`, each with its `policies`, and with the most `machines` that one repetition was made on; `left_out`: runs
    with faults. If `faulty`, such runs count as well, except those in which a request failed or is missing in the
    scheduler's log."""
    cells: dict[Cell, dict[str, dict[int, Found]]] = defaultdict(lambda: defaultdict(dict))
    machines: dict[Cell, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    left_out = []
    every = {Run.of_json(each["run"]): each for each in found}
    own = {run: _faults(each, faulty) for run, each in every.items()}
    for run, each in every.items():
        if faults := [*own[run], *_faults_of_capacity(run, every, own)]:
            left_out.append({"run": run.name, "faults": faults})
        else:
            cells[run.cell][run.policy][run.repetition] = each
            parts = [each] if run.cell.load == BURST else [each, every[run.capacity]]
            machines[run.cell][run.repetition].update(json.dumps(part["machine"]) for part in parts)
    ordered = sorted(cells, key=lambda cell: (cell.slots, cell.load == BURST, cell.load))
    most = {cell: max(map(len, machines[cell].values())) for cell in ordered}
    every_cell = [_cell(cell, cells[cell], draft_len) | {"machines": most[cell]} for cell in ordered]
    return {"cells": every_cell, "left_out": left_out}


def _faults(each: Found, faulty: bool) -> Sequence[str]:
    """Why the run itself does not count."""
    whole = all(row["steady_s"] and not row["error"] for row in each["requests"])
    return [] if faulty and whole else each["faults"]


def _faults_of_capacity(run: Run, every: Mapping[Run, Found], own: Mapping[Run, Sequence[str]]) -> Iterator[str]:
    """Why the run was not at its load. `own`: each run's own faults."""
    capacity = every.get(run.capacity)
    if run.cell.load == BURST:
        return
    if not capacity or capacity["results"]["request_throughput"] != every[run]["capacity"]:
        yield "the capacity was measured anew since"
    elif own[run.capacity]:
        yield "its capacity was disturbed"


def _cell(cell: Cell, policies: Mapping[str, Runs], draft_len: int) -> dict[str, Any]:
    burst = cell.load == BURST
    policies = _compared(policies) if burst else policies
    base = policies.get(BASE, {})
    simulated = {
        name: {each: replay.predicted_mean_ms(run, name, draft_len) for each, run in runs.items()}
        for name, runs in policies.items()
    }
    costs = replay.costs_of([run for runs in policies.values() for run in runs.values()])
    rows = {name: _policy(name, policies, simulated, burst=burst) for name in sorted(policies, key=_place)}
    at_equal_speed = {
        name: {each: replay.predicted_mean_ms(base[each], name, draft_len, costs) for each in base.keys() & runs.keys()}
        for name, runs in {**policies, replay.ORACLE: base}.items()
    }
    for name, row in rows.items():
        if shared := at_equal_speed[name]:
            row["equal_speed_ratio"] = _over(shared, at_equal_speed[BASE])
        each = [replay.at_steady_speed(run, name, draft_len) for run in policies[name].values()]
        row["predicted_at_steady_speed"] = means.fmean(each)
    return asdict(cell) | {
        "name": cell.name,
        "requests": max(row["requests"] for row in rows.values()),
        "policies": rows,
        "against_ours": dict(_against_ours(policies, burst=burst)),
        "oracle": _oracle(at_equal_speed[replay.ORACLE], at_equal_speed.get(BASE, {})),
        "step_costs": asdict(costs),
        "kv_tokens": min(run["kv_tokens"] for runs in policies.values() for run in runs.values()),
        "lengths": _lengths(policies),
    }


def _compared(policies: Mapping[str, Runs]) -> Mapping[str, Runs]:
    """`policies` in a burst, the base without what no other policy ran: that was run for a capacity."""
    others = {each for name, runs in policies.items() if name != BASE for each in runs}
    shared = {each: run for each, run in policies.get(BASE, {}).items() if each in others}
    return {**policies, BASE: shared} if shared else policies


def _place(policy: str) -> tuple[bool, bool, str]:
    """Sort key of policies: the base first, OURS last."""
    return policy != BASE, policy == OURS, policy


def _policy(
    name: str, policies: Mapping[str, Runs], simulated: Mapping[str, Mapping[int, float]], *, burst: bool
) -> dict[str, Any]:
    runs, base = policies[name], policies.get(BASE, {})
    shared = sorted(runs.keys() & base.keys())
    mine, theirs = (_latencies(some, "e2el_ms", shared) for some in (runs, base))
    every = sorted(runs)
    kinds = [[row["category"] for row in runs[repetition]["requests"]] for repetition in every]
    e2el = _latencies(runs, "e2el_ms", every)
    row: dict[str, Any] = {
        "repetitions": len(runs),
        "served": every,
        "requests": sum(len(run["requests"]) for run in runs.values()),
        "e2el_ms": times_ms(e2el),
        "quantiles_ms": quantiles_ms(e2el),
        "ttft_ms": times_ms(_latencies(runs, "ttft_ms", every)),
        **_pauses(runs, every),
        "good_share": means.fmean(
            is_good(row["ttft_ms"], row["e2el_ms"], row["output_tokens"])
            for each in every
            for row in runs[each]["requests"]
        ),
        "e2el_ms_by_kind": by_kind(e2el, kinds),
        "output_throughput": means.fmean(run["results"]["output_throughput"] for run in runs.values()),
        "preemptions_per_request": means.fmean(run["results"]["preemptions_per_request"] for run in runs.values()),
        "busy_share": means.fmean(_busy_share(run) for run in runs.values()),
        "idle_share": max(run["scheduler"]["idle_share"] for run in runs.values()),
        "report_to_command_p99_ms": max(run["scheduler"]["report_to_command_p99_ms"] for run in runs.values()),
        "explained": means.fmean(run["predictor"]["explained"] for run in runs.values()),
        "faults": sum(bool(run["faults"]) for run in runs.values()),
        "results": _averaged([run["results"] for run in runs.values()]),
    }
    row["predicted_mean_ms"] = means.fmean(simulated[name].values())
    if shared:
        found = ratio(mine, theirs, burst=burst)
        row["ratio"] = asdict(found) | {"verdict": found.verdict}
        row["ratios"] = [float(one.mean() / other.mean()) for one, other in zip(mine, theirs, strict=True)]
        predicted, predicted_base = (math.fsum(simulated[each][r] for r in shared) for each in (name, BASE))
        row["predicted_ratio"] = predicted / predicted_base
    return row


def _pauses(runs: Runs, repetitions: Sequence[int]) -> dict[str, Any]:
    """The longest pause of each request; nothing of runs that were made before it was noted."""
    noted = all("pause_ms" in row for each in repetitions for row in runs[each]["requests"])
    return {"pause_ms": times_ms(_latencies(runs, "pause_ms", repetitions))} if noted else {}


def _over(means_ms: Mapping[int, float], base_ms: Mapping[int, float]) -> float:
    """The ratio of mean latencies over the repetitions in `means_ms`, all of which the base has."""
    return math.fsum(means_ms.values()) / math.fsum(base_ms[each] for each in means_ms)


def _busy_share(run: Found) -> float:
    """The share of the time from the first arrival to the last end in which the model was busy: the true load."""
    *_, seconds = zip(*run["steps"], strict=True)
    return min(1.0, math.fsum(seconds) / float(run["results"]["duration"]))


def _against_ours(policies: Mapping[str, Runs], *, burst: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The ratio of OURS to each of the others, by name."""
    ours = policies.get(OURS, {})
    for name, runs in policies.items():
        if name != OURS and (shared := sorted(ours.keys() & runs.keys())):
            mine, theirs = (_latencies(some, "e2el_ms", shared) for some in (ours, runs))
            found = ratio(mine, theirs, burst=burst)
            yield name, asdict(found) | {"verdict": found.verdict}


def _oracle(means_ms: Mapping[int, float], base_ms: Mapping[int, float]) -> dict[str, float] | None:
    """What a policy that knows the true lengths would gain, in the simulator."""
    if not means_ms:
        return None
    return {"predicted_mean_ms": means.fmean(means_ms.values()), "predicted_ratio": _over(means_ms, base_ms)}


def _latencies(runs: Runs, name: str, repetitions: Sequence[int]) -> Latencies:
    return [np.array([row[name] for row in runs[each]["requests"]]) for each in repetitions]


def _lengths(policies: Mapping[str, Runs]) -> dict[str, int]:
    """How many requests were answered, and how many of them with different lengths under different policies."""
    answers: dict[tuple[int, int], set[int]] = defaultdict(set)
    for runs in policies.values():
        for repetition, run in runs.items():
            for index, row in enumerate(run["requests"]):
                answers[repetition, index].add(row["output_tokens"])
    return {"answers": len(answers), "differ": sum(len(tokens) > 1 for tokens in answers.values())}


def _averaged(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The means over repetitions of the figures that `vllm bench serve` has, too."""
    names = [name for name, value in results[0].items() if isinstance(value, int | float)]
    return {name: means.fmean(result[name] for result in results) for name in names if name != "kept_up"}


def whole(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of the policies that served the same requests as the one that served most. Latencies of others are of
    other requests; only their ratios are not."""
    most = max(cell["policies"].values(), key=lambda row: row["repetitions"])
    return {name: row for name, row in cell["policies"].items() if _served(row) == _served(most)}


def _served(row: Mapping[str, Any]) -> Any:
    """Older records have only how many."""
    return row.get("served", row["repetitions"])


# ---- in words ----


def sentences(summary: Mapping[str, Any]) -> Iterator[str]:
    """Remarks: where policies do not differ, and what is wrong."""
    for cell in summary["cells"]:
        for name, row in cell["policies"].items():
            if name != BASE and "ratio" in row and row["ratio"]["verdict"] == "same":
                yield f"{cell['name']}: no difference between {name} and {BASE} that these runs show: {span(row)}."
    yield from wrong(summary)


def wrong(summary: Mapping[str, Any]) -> Iterator[str]:
    """Only what is wrong: with the default policy, the runs or the simulator."""
    for cell in summary["cells"]:
        for name, found in cell["against_ours"].items():
            if found["verdict"] == "higher":
                yield f"{cell['name']}: {OURS} is slower than {name}, {found['value']:.3f} times."
        if (many := cell.get("machines", 1)) > 1:
            yield f"{cell['name']}: one repetition was made on {many} machines, so that ratios may be of these, too."
        if differ := cell["lengths"]["differ"]:
            yield (
                f"{cell['name']}: {differ} of {cell['lengths']['answers']} answers differ in length between policies, "
                "which they should not."
            )
        for name, row in cell["policies"].items():
            yield from _amiss(f"{cell['name']}, {name}", row)
    for each in summary["left_out"]:
        yield f"left out: {each['run']}, since {'; '.join(each['faults'])}."


def span(row: Mapping[str, Any]) -> str:
    found = row["ratio"]
    return f"{found['value']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def _amiss(what: str, row: Mapping[str, Any]) -> Iterator[str]:
    live = row["e2el_ms"]["mean"]
    if abs(row["predicted_mean_ms"] / live - 1) > MEAN_WITHIN:
        yield (
            f"{what}: the simulator's mean latency is {row['predicted_mean_ms'] / live:.2f} times the live one; "
            f"{row['predicted_at_steady_speed']:.2f} times, were the machine equally fast all along."
        )
    if "ratio" in row and abs(row["predicted_ratio"] / row["ratio"]["value"] - 1) > RATIO_WITHIN:
        yield f"{what}: the simulator's ratio is {row['predicted_ratio']:.3f}, live {row['ratio']['value']:.3f}."
    if row["idle_share"] > MOST_IDLE:
        yield f"{what}: the model waited for the scheduler {row['idle_share']:.1%} of the time."
    if row["faults"]:
        yield f"{what}: {row['faults']} of {row['repetitions']} runs were disturbed."
