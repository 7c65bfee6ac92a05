"""Workloads: what arrives when, and the truth about it. Reads and writes files; draws nothing at random.

A job knows its true length; the core gets only `Job.request`, which does not.
"""

import csv
import gzip
import io
import json
import math
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TextIO, TypeVar

from scheduler_service.core.beliefs import Expected
from scheduler_service.core.probed import Reading
from scheduler_service.core.types import Request, RequestClass
from scheduler_service.predictor.features import of_category
from scheduler_service.predictor.port import Features
from scheduler_service.sim import fields

MOST_TOKENS = 1_000_000  # of one request: more is a mistake in the file
MOST_DRAFT = 64  # tokens of one draft
CSV_FIELDS = ("arrival_s", "input_tokens", "output_tokens")
JSON_FIELDS = {"arrival_s", "prompt_tokens", "output_tokens", "predicted_output_tokens", "accepted", "drafted"}
JSON_FIELDS |= {"draft_len", "max_tokens", "expected", "readings", "class", "category", "tenant", "prompt"}

T = TypeVar("T")


class WorkloadError(ValueError):
    """A workload that cannot be read; says in which file, line and field, and what is wrong."""


@dataclass(frozen=True)
class Job:
    """One request of a workload. `accepted`: accepted draft tokens of each round at `draft_len`; when the list ends it
    starts over. Empty: not known, and to be drawn. `output_tokens` 0: not fixed, which only a live run takes.

    Of recordings: `drafted`, what the drafter made of the draft length in each of these rounds (empty: all of it);
    `max_tokens`, the client's bound (None: one for all that tells nothing); `expected`, what a predictor said of it;
    `readings`, those of a worker's probe, the earliest first."""

    id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    accepted: tuple[int, ...] = ()
    draft_len: int = 4
    predicted_output_tokens: int | None = None
    klass: RequestClass = RequestClass.DEFAULT
    category: str = ""
    tenant: str = ""
    prompt: str = ""  # its text, if it has one: then `prompt_tokens` may be an estimate
    drafted: tuple[int, ...] = ()
    max_tokens: int | None = None
    expected: Expected | None = None
    readings: tuple[Reading, ...] = ()

    def request(self, max_tokens: int) -> Request:
        """What a scheduler may know of it. `max_tokens`, of those without their own, is the same for all."""
        return Request(
            self.id,
            self.arrival_s,
            self.prompt_tokens,
            self.max_tokens or max_tokens,
            self.klass,
            predicted_tokens=self.predicted_output_tokens,
            expected=self.expected,
            tenant=self.tenant,
        )

    def features(self) -> Features:
        """What a predictor may know of it."""
        return of_category(self.category, self.prompt_tokens, self.klass)

    def reading(self, start: int, new: int) -> Reading | None:
        """The last one of a round with `new` tokens after the first `start` that does not end the output."""
        end = start + new
        within = [each for each in self.readings if start < each.after <= end < self.output_tokens]
        return within[-1] if within else None

    def round(self, counted: int, emitted: int) -> int:
        """Which of its rounds comes next. The core has not `counted` a recorded first one that computed the prompt and
        drafted nothing, though it emitted a token."""
        return counted + (emitted > 0 and self.drafted[:1] == (0,))

    def drafts(self, round: int, allowed: int) -> int:
        """How many tokens are drafted in that round where `allowed` may be."""
        return min(allowed, self.drafted[round % len(self.drafted)]) if self.drafted else allowed

    def accepts(self, round: int, drafts: int) -> int:
        """How many of `drafts` are accepted in that round.

        A recorded round that accepted all it drafted says nothing of further ones: they are drawn with the job's own
        chance, the same whenever it is asked.
        """
        accepted = self.accepted[round % len(self.accepted)] if self.accepted else 0
        if drafts <= self.draft_len or accepted < self.draft_len:
            return min(accepted, drafts)
        rejected = sum(1 for other in self.accepted if other < self.draft_len)
        chance = sum(self.accepted) / (sum(self.accepted) + rejected)
        rng = Random(f"{self.id} {round}")
        while accepted < drafts and rng.random() < chance:
            accepted += 1
        return accepted

    def rounds(self, draft_len: int) -> int:
        """Rounds that its output takes with `draft_len` drafts each."""
        rounds = emitted = 0
        while emitted < self.output_tokens:
            emitted += self.accepts(rounds, self.drafts(rounds, draft_len)) + 1
            rounds += 1
        return rounds


def read_workload(
    path: Path, *, arrivals: bool = True, lengths: bool = True, note: Callable[[str], object] | None = None
) -> list[Job]:
    """The jobs of a JSON Lines or CSV file (also .gz) in order of arrival. Raises WorkloadError.

    `arrivals`, `lengths`: whether each must say when it arrives, and how long its output is. `note` gets one sentence
    if the file has fields that are not known; they are read over.
    """
    kind = path.suffixes[-2:-1] if path.suffix == ".gz" else path.suffixes[-1:]
    if kind not in ([".jsonl"], [".csv"]):
        raise WorkloadError(f"{path.name}: must end in .jsonl or .csv, or in one of these and .gz")
    try:
        unknown: set[str] = set()
        with _open(path) as file:
            rows = _json_rows(path, file, unknown) if kind == [".jsonl"] else _csv_rows(path, file, unknown)
            jobs = [_job(f"{path.name}:{line}", f"{line:07d}", row, arrivals, lengths) for line, row in rows]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise WorkloadError(f"{path.name}: cannot be read: {error}") from None
    if not jobs:
        raise WorkloadError(f"{path.name}: holds no request")
    if unknown and note:
        note(f"{path.name}: fields that are not known were read over: {', '.join(sorted(unknown))}")
    return sorted(jobs, key=lambda job: job.arrival_s)


def write_workload(path: Path, jobs: Iterable[Job]) -> None:
    """As JSON Lines (compressed if its name ends in .gz), so that others can run the same."""
    with _create(path) as file:
        for job in jobs:
            row: dict[str, object] = {
                "arrival_s": round(job.arrival_s, 6),
                "prompt_tokens": job.prompt_tokens,
                "output_tokens": job.output_tokens,
                "predicted_output_tokens": job.predicted_output_tokens,
                "accepted": list(job.accepted),
                "drafted": list(job.drafted),
                "draft_len": job.draft_len,
                "max_tokens": job.max_tokens,
                "expected": fields.expected_row(job.expected),
                "readings": [[each.after, round(math.exp(each.location), 2)] for each in job.readings],
                "class": job.klass.name.lower(),
                "category": job.category,
                "tenant": job.tenant,
                "prompt": job.prompt,
            }
            file.write(json.dumps({key: value for key, value in row.items() if value not in (None, "", [], {})}) + "\n")


def _create(path: Path) -> TextIO:
    """Equal jobs are equal bytes."""
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.GzipFile(path, "wb", mtime=0), encoding="utf-8")
    return path.open("w", encoding="utf-8")


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _json_rows(path: Path, file: TextIO, unknown: set[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WorkloadError(f"{path.name}:{line}: is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise WorkloadError(f"{path.name}:{line}: must be an object with arrival_s, prompt_tokens and so on")
        unknown |= row.keys() - JSON_FIELDS
        yield line, row


def _csv_rows(path: Path, file: TextIO, unknown: set[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    rows = csv.DictReader(file, strict=True)
    for column in CSV_FIELDS:
        if column not in (rows.fieldnames or ()):
            raise WorkloadError(f"{path.name}:1: {column}: this column is missing")
    unknown |= {*(rows.fieldnames or ())} - {*CSV_FIELDS, ""}
    for row in rows:
        line = rows.line_num
        yield (
            line,
            {
                "arrival_s": _number(f"{path.name}:{line}: arrival_s", row["arrival_s"]),
                "prompt_tokens": _number(f"{path.name}:{line}: input_tokens", row["input_tokens"]),
                "output_tokens": _number(f"{path.name}:{line}: output_tokens", row["output_tokens"]),
            },
        )


def _number(where: str, text: str | None) -> float | int:
    try:
        number = float(text or "")
    except ValueError:
        raise WorkloadError(f"{where}: {text!r} is not a number") from None
    return int(number) if number.is_integer() else number


def _job(where: str, id: str, row: Mapping[str, Any], arrivals: bool, lengths: bool) -> Job:
    def field(name: str, parse: Callable[[object], T], default: T) -> T:
        if row.get(name) is None:
            return default
        try:
            return parse(row[name])
        except ValueError as error:
            raise WorkloadError(f"{where}: {name}: {error}") from None

    if arrivals and row.get("arrival_s") is None:
        raise WorkloadError(f"{where}: arrival_s: is missing")
    draft_len = field("draft_len", fields.whole(1, MOST_DRAFT), 4)
    recorded: tuple[int, ...] = ()
    no_readings: tuple[Reading, ...] = ()
    accepted = field("accepted", fields.list_of(fields.whole(0, draft_len)), recorded)
    drafted = field("drafted", fields.list_of(fields.whole(0, draft_len)), recorded)
    if drafted and (len(drafted) != len(accepted) or any(map(operator.gt, accepted, drafted))):
        raise WorkloadError(f"{where}: drafted: must hold as many rounds as accepted, none with fewer tokens")
    prompt = field("prompt_tokens", fields.whole(0, MOST_TOKENS), 0) or field("prompt", fields.text_tokens, 0)
    if not prompt:
        raise WorkloadError(f"{where}: prompt_tokens: is missing, and so is prompt")
    output = field("output_tokens", fields.whole(1, MOST_TOKENS), 0) or sum(accepted) + len(accepted)
    if lengths and not output:
        raise WorkloadError(
            f"{where}: output_tokens: is missing, and so is accepted; a simulation needs the true length"
        )
    max_tokens = field("max_tokens", fields.whole(1, MOST_TOKENS), None)
    if max_tokens is not None and output > max_tokens:
        raise WorkloadError(f"{where}: max_tokens: {max_tokens}, but its output has {output} tokens")
    return Job(
        id=id,
        arrival_s=field("arrival_s", fields.seconds, 0.0),
        prompt_tokens=prompt,
        output_tokens=output,
        accepted=accepted,
        draft_len=draft_len,
        predicted_output_tokens=field("predicted_output_tokens", fields.predicted(MOST_TOKENS), None),
        klass=field("class", fields.klass, RequestClass.DEFAULT),
        category=field("category", fields.text, ""),
        tenant=field("tenant", fields.text, ""),
        prompt=field("prompt", fields.text, ""),
        drafted=drafted,
        max_tokens=max_tokens,
        expected=field("expected", fields.expectation, None),
        readings=field("readings", fields.readings, no_readings),
    )
