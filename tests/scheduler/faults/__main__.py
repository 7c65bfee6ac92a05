"""Runs schedules by the thousand, and one of them again: `python -m tests.scheduler.faults --help`."""

import argparse
import gc
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import structlog

from tests.scheduler.faults.loop import PROCESS
from tests.scheduler.faults.schedule import Schedule, schedule
from tests.scheduler.faults.stand_ins import simulated
from tests.scheduler.faults.world import Result, run

CHUNK = 20  # schedules, between two collections of garbage
SHOWN = 10  # failures that are shrunk and told


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scheduler.faults", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; each further one has the next")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--replay", type=int, metavar="SEED", help="this schedule alone, with all that is logged")
    parser.add_argument("--faults", type=_numbers, help="of the replay: only these, as 0,2; `-` for none")
    parser.add_argument("--jobs", type=_numbers, help="of the replay: only these")
    chosen = parser.parse_args()
    if chosen.replay is not None:
        return _replay(only(schedule(chosen.replay), chosen.faults, chosen.jobs))
    return _run_all(range(chosen.seed, chosen.seed + chosen.schedules), chosen.processes)


def _numbers(text: str) -> list[int]:
    return [] if text == "-" else [int(word) for word in text.split(",")]


def only(whole: Schedule, faults: Iterable[int] | None, jobs: Iterable[int] | None) -> Schedule:
    """The same with some of its faults and jobs; None: all."""
    return replace(
        whole,
        faults=whole.faults if faults is None else tuple(whole.faults[i] for i in faults),
        jobs=whole.jobs if jobs is None else tuple(whole.jobs[i] for i in jobs),
    )


def _replay(one: Schedule) -> int:
    structlog.configure(processors=[_stamp, structlog.processors.KeyValueRenderer()], cache_logger_on_first_use=False)
    for part in (one, *one.jobs, *one.faults):
        print(part)
    with simulated():
        result = run(one)
    print(f"{result.virtual_s:.3f} s of virtual time, {result.steps} steps; {dict(result.outcomes)}")
    print("\n".join(result.broken) or "kept")
    return 1 if result.broken else 0


def _stamp(_: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    process = PROCESS.get()
    where = {} if process is None else {"at": f"{process.loop.now:.4f}", "who": process.name}
    return where | {"level": method} | event


def quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def _run_all(seeds: range, processes: int) -> int:
    quiet()
    begun = time.perf_counter()
    faults: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    failed: list[int] = []
    done = 0
    virtual_s = 0.0
    gc.collect()
    gc.freeze()
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for results in pool.imap_unordered(_run_some, chunks):
            for result in results:
                faults += result.faults
                outcomes += result.outcomes
                virtual_s += result.virtual_s
                if result.broken:
                    failed.append(result.schedule.seed)
                    if len(failed) <= SHOWN:
                        print(f"\nseed {result.schedule.seed}: {result.broken[0]}", flush=True)
            done += len(results)
            if sys.stderr.isatty() or done % 1000 < CHUNK:
                print(f"\r{done} schedules, {len(failed)} failed", end="", file=sys.stderr, flush=True)
    spent = time.perf_counter() - begun
    print(f"\n{done} schedules from seed {seeds.start} in {spent:.0f} s ({done / spent:.0f}/s, {processes} processes),")
    print(f"{virtual_s / 3600:.1f} h of virtual time; {sum(faults.values())} faults:")
    print("  " + ", ".join(f"{kind} {count}" for kind, count in faults.most_common()))
    print(
        f"{sum(outcomes.values())} streams: " + ", ".join(f"{kind} {count}" for kind, count in outcomes.most_common())
    )
    for seed in sorted(failed)[:SHOWN]:
        print(f"FAILED {_smallest(schedule(seed))}")
    print(f"{len(failed)} failed")
    return 1 if failed else 0


def _run_some(seeds: range) -> list[Result]:
    gc.disable()
    with simulated():
        results = [run(schedule(seed)) for seed in seeds]
    gc.unfreeze()  # each service of a schedule freezes all that is there, the worlds of earlier ones too
    gc.collect()
    gc.freeze()
    return results


def _smallest(whole: Schedule) -> str:
    """The command that replays what still fails when no fault and no job can be left out any more."""
    faults, jobs = list(range(len(whole.faults))), list(range(len(whole.jobs)))
    with simulated():
        for kept in (faults, jobs):
            for number in list(kept):
                kept.remove(number)
                if not (jobs and run(only(whole, faults, jobs)).broken):
                    kept.append(number)
                    kept.sort()
        why = run(only(whole, faults, jobs)).broken
    chosen = f"--faults {_listed(faults)} --jobs {_listed(jobs)}"
    return f"python -m tests.scheduler.faults --replay {whole.seed} {chosen}: {why[0] if why else 'not again'}"


def _listed(numbers: list[int]) -> str:
    return ",".join(map(str, numbers)) or "-"


if __name__ == "__main__":
    sys.exit(main())
