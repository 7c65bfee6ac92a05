"""Makes the missing runs of a comparison, one after the other. Knows neither flags nor tables."""

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace

import typer

from laps_sd import machine
from laps_sd.compare import identity, live
from laps_sd.compare.design import BASE, BURST, Drawn, Run, Settings, due
from laps_sd.compare.folder import Folder, read, runs_of, write
from laps_sd.options import Options
from scheduler_service.sim.oracle import parts

ATTEMPTS = 2  # at a run, if the first was disturbed
TEACHING_SLOTS = 4


class Work:
    """Makes the missing runs. `tolerant`: disturbed runs count and are not repeated."""

    def __init__(self, folder: Folder, drawn: Drawn, settings: Settings, options: Options, *, tolerant: bool) -> None:
        """Raises folder.Damaged."""
        self.tolerant = tolerant
        self._folder, self._drawn, self._settings, self._options = folder, drawn, settings, options
        self._took_s: list[float] = [run["took_s"] for run in runs_of(folder.path)]

    @property
    def pace_s(self) -> float:
        """The mean time of the runs that were made."""
        return math.fsum(self._took_s) / max(1, len(self._took_s))

    def through(self, asked: Sequence[Run], minutes: float | None) -> int:
        """Makes the runs in order for `minutes` at most. Returns how many are missing then. Raises live.Interrupted,
        OtherSettings, Damaged, ModelError."""
        until_s = math.inf if minutes is None else time.monotonic() + 60 * minutes
        for run in asked:
            if self._ends_after(until_s):
                break
            if self._done(run) or not (run.cell.load == BURST or self._done(run.capacity)):
                continue  # without its capacity a run has no load
            self._teach()
            self._run(run, until_s)
        return sum(not self._done(run) for run in asked)

    def _ends_after(self, until_s: float) -> bool:
        """Whether a run that began now would likely end later."""
        return time.monotonic() + max(self._took_s, default=0.0) >= until_s

    def _done(self, run: Run) -> bool:
        """Whether the folder has the run, by the policy's code of now; a load by the capacity that there is now."""
        if not self._folder.has(run, faulty=self.tolerant):
            return False
        if self._folder[run].get("policy_code", "") != identity.policy_code(run.policy):
            return False
        if run.cell.load == BURST:
            return True
        return self._folder.has(run.capacity, faulty=True) and self._folder[run]["capacity"] == self._capacity(run)

    def _capacity(self, run: Run) -> float:
        """Of the run's cell and repetition, in requests a second."""
        return float(self._folder[run.capacity]["results"]["request_throughput"])

    def _teach(self) -> None:
        """Teaches the predictor, unless the folder has what it learned of the same model."""
        file = self._folder.path / "taught.json"
        made_with = identity.made_with(self._options.model, self._options.drafter)
        if file.exists():
            return self._folder.check_equal(read(file)["made_with"], made_with)
        shutil.rmtree(self._folder.taught, ignore_errors=True)
        typer.echo(f"teaching the predictor with {self._settings.taught} answers", err=True)
        lesson = self._drawn.lesson()
        options = replace(self._options, policy=BASE, slots=TEACHING_SLOTS)
        try:
            measured = live.teach(options, lesson, self._folder.taught, self._folder.log)
        except live.Untaught as error:
            typer.echo(f"laps-sd: {error}; {self._folder.log} has more", err=True)
            raise typer.Exit(1) from None
        results = live.as_json(measured, lesson)["results"]
        if results["failed"]:
            typer.echo(f"laps-sd: {results['failed']} requests failed; {self._folder.log} has more", err=True)
            raise typer.Exit(1)
        write(file, results | {"made_with": made_with})

    def _run(self, run: Run, until_s: float) -> None:
        """Once more if it was disturbed, unless that would end after `until_s`."""
        requests = self._drawn.requests(run.repetition)
        capacity = 1.0 if run.cell.load == BURST else self._capacity(run)
        times_s = due(run, len(requests), capacity, self._settings.seed)
        plan = [replace(planned, due_s=due_s) for planned, due_s in zip(requests, times_s, strict=True)]
        (name, policy_set), policy_code = parts(run.policy), identity.policy_code(run.policy)
        options = replace(self._options, slots=run.cell.slots, policy=name, policy_set=tuple(policy_set))
        for attempt in range(1, ATTEMPTS + 1):
            began = time.monotonic()
            measured = live.measure(options, plan, self._drawn.lesson(), self._folder.taught, self._folder.log)
            took_s = time.monotonic() - began
            self._took_s.append(took_s)
            figures = live.as_json(measured, plan, self._settings.pace)
            kept = {"capacity": capacity, "took_s": round(took_s, 1), "attempt": attempt}
            made_by = {"policy_code": policy_code, "machine": machine.machine(), "versions": machine.versions()}
            self._folder.add(run, figures | kept | made_by)
            mean_s = figures["results"]["mean_e2el_ms"] / 1e3
            faults = f"; disturbed: {'; '.join(figures['faults'])}" if figures["faults"] else ""
            idle = figures["scheduler"]["idle_share"]
            typer.echo(f"{run.name}: mean {mean_s:.2f} s, model idle {idle:.1%}, took {took_s:.0f} s{faults}", err=True)
            if self.tolerant or not figures["faults"] or self._ends_after(until_s):
                return
