"""Workload files: what is read, and what is said of a bad one."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler_service.core.beliefs import Expected, Length
from scheduler_service.core.types import RequestClass
from scheduler_service.sim.generate import Synthetic, generate
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job, WorkloadError, read_workload, write_workload

GOOD = {"arrival_s": 0.5, "prompt_tokens": 10, "output_tokens": 20}


def jsonl(folder: Path, *rows: object) -> Path:
    path = folder / "work.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_every_field_of_a_line_is_read(tmp_path: Path) -> None:
    row = GOOD | {
        "accepted": [2, 0],
        "draft_len": 2,
        "predicted_output_tokens": 7,
        "class": "batch",
        "category": "code",
        "tenant": "t",
    }
    (job,) = read_workload(jsonl(tmp_path, row))
    assert job == Job("0000001", 0.5, 10, 20, (2, 0), 2, 7, RequestClass.BATCH, "code", "t")


def test_lines_come_in_order_of_arrival(tmp_path: Path) -> None:
    path = jsonl(tmp_path, GOOD | {"arrival_s": 2}, GOOD | {"arrival_s": 1}, "")
    assert [job.arrival_s for job in read_workload(path)] == [1, 2]


def test_a_whole_number_may_be_written_as_a_fraction(tmp_path: Path) -> None:
    (job,) = read_workload(jsonl(tmp_path, GOOD | {"prompt_tokens": 10.0}))
    assert (job.prompt_tokens, type(job.prompt_tokens)) == (10, int)


def test_a_prompt_counts_four_bytes_a_token(tmp_path: Path) -> None:
    (job,) = read_workload(jsonl(tmp_path, {"arrival_s": 0, "prompt": "nine char", "output_tokens": 1}))
    assert job.prompt_tokens == 3


def test_a_live_run_takes_texts_alone(tmp_path: Path) -> None:
    (job,) = read_workload(jsonl(tmp_path, {"prompt": "Why?"}), arrivals=False, lengths=False)
    assert (job.prompt, job.output_tokens, job.arrival_s) == ("Why?", 0, 0.0)


def test_the_length_follows_from_what_was_accepted(tmp_path: Path) -> None:
    (job,) = read_workload(jsonl(tmp_path, {"arrival_s": 0, "prompt_tokens": 1, "accepted": [3, 0, 1]}))
    assert job.output_tokens == 7


@pytest.mark.parametrize("name", ["work.csv", "work.csv.gz"])
def test_csv_is_read_whatever_its_other_columns(tmp_path: Path, name: str) -> None:
    text = b"arrival_s,client,input_tokens,output_tokens\n0.25,7,100,20\n1,8,5,6\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert [(j.arrival_s, j.prompt_tokens, j.output_tokens) for j in read_workload(path)] == [
        (0.25, 100, 20),
        (1, 5, 6),
    ]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    jobs = generate(Synthetic(requests=20, load=2), 3, SimFleet())
    write_workload(tmp_path / "work.jsonl", jobs)
    again = read_workload(tmp_path / "work.jsonl")
    assert [(j.output_tokens, j.accepted, j.predicted_output_tokens) for j in again] == [
        (j.output_tokens, j.accepted, j.predicted_output_tokens) for j in jobs
    ]


@pytest.mark.parametrize(("predicted", "tokens"), [(136.0, 136), (7.6, 8), (0.2, 1), (3, 3)])
def test_a_prediction_may_be_a_fraction(tmp_path: Path, predicted: float, tokens: int) -> None:
    (job,) = read_workload(jsonl(tmp_path, GOOD | {"predicted_output_tokens": predicted}))
    assert job.predicted_output_tokens == tokens


def test_fields_that_are_not_known_are_read_over_with_one_note(tmp_path: Path) -> None:
    notes: list[str] = []
    jobs = read_workload(jsonl(tmp_path, GOOD | {"zeal": 1, "user": "x"}, GOOD | {"zeal": 2}), note=notes.append)
    assert len(jobs) == 2
    assert notes == ["work.jsonl: fields that are not known were read over: user, zeal"]


def test_a_file_of_known_fields_alone_brings_no_note(tmp_path: Path) -> None:
    notes: list[str] = []
    write_workload(tmp_path / "work.jsonl", generate(Synthetic(requests=3), 1, SimFleet()))
    read_workload(tmp_path / "work.jsonl", note=notes.append)
    assert notes == []


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{", "work.jsonl:2: is not JSON"),
        ([1], "work.jsonl:2: must be an object"),
        ({"prompt_tokens": 1, "output_tokens": 1}, "work.jsonl:2: arrival_s: is missing"),
        (GOOD | {"arrival_s": -1}, "work.jsonl:2: arrival_s: -1 is not a number of seconds"),
        (GOOD | {"arrival_s": float("nan")}, "work.jsonl:2: arrival_s: nan"),
        (GOOD | {"arrival_s": True}, "work.jsonl:2: arrival_s: True"),
        (GOOD | {"arrival_s": 10**400}, "work.jsonl:2: arrival_s: 10000"),
        (GOOD | {"category": "\ud800"}, "work.jsonl:2: category: "),
        ("[" * 100_000, "work.jsonl:2: is not JSON"),
        (GOOD | {"prompt_tokens": 1.5}, "work.jsonl:2: prompt_tokens: 1.5 is not a whole number"),
        (GOOD | {"prompt_tokens": 0}, "work.jsonl:2: prompt_tokens: is missing"),
        (GOOD | {"output_tokens": -3}, "work.jsonl:2: output_tokens: -3"),
        (GOOD | {"output_tokens": 10**7}, "work.jsonl:2: output_tokens: 10000000"),
        ({"arrival_s": 0, "prompt_tokens": 1}, "work.jsonl:2: output_tokens: is missing"),
        (GOOD | {"accepted": 3}, "work.jsonl:2: accepted: 3 is not a list"),
        (GOOD | {"accepted": [5]}, "work.jsonl:2: accepted: 5 is not a whole number from 0 to 4"),
        (GOOD | {"draft_len": "x"}, "work.jsonl:2: draft_len: 'x'"),
        (GOOD | {"predicted_output_tokens": 0}, "work.jsonl:2: predicted_output_tokens: 0"),
        (GOOD | {"predicted_output_tokens": float("nan")}, "work.jsonl:2: predicted_output_tokens: nan"),
        (GOOD | {"predicted_output_tokens": True}, "work.jsonl:2: predicted_output_tokens: True"),
        (GOOD | {"class": "vip"}, "work.jsonl:2: class: 'vip' is none of interactive, default, batch"),
        (GOOD | {"max_tokens": 1, "output_tokens": 5}, "work.jsonl:2: max_tokens: 1, but its output has 5 tokens"),
        (GOOD | {"tenant": 3}, "work.jsonl:2: tenant: 3 is not text"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, row: object, complaint: str) -> None:
    with pytest.raises(WorkloadError) as raised:
        read_workload(jsonl(tmp_path, GOOD, row))
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("arrival_s,output_tokens\n", "work.csv:1: input_tokens: this column is missing"),
        ("arrival_s,input_tokens,output_tokens\n0,many,3\n", "work.csv:2: input_tokens: 'many' is not a number"),
        ("arrival_s,input_tokens,output_tokens\n0,1,2\n0,1\n", "work.csv:3: output_tokens: None is not a number"),
        ("arrival_s,input_tokens,output_tokens\n0,1,2.5\n", "work.csv:2: output_tokens: 2.5 is not a whole number"),
        ("arrival_s,input_tokens,output_tokens\n", "work.csv: holds no request"),
    ],
)
def test_a_bad_csv_is_named_with_its_field(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "work.csv"
    path.write_text(text)
    with pytest.raises(WorkloadError) as raised:
        read_workload(path)
    assert complaint in str(raised.value)


def test_csv_as_a_spreadsheet_saves_it_begins_with_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "work.csv"
    path.write_text("\ufeffarrival_s,input_tokens,output_tokens\n0,1,2\n", encoding="utf-8")
    assert len(read_workload(path)) == 1


@pytest.mark.parametrize("name", ["absent.jsonl", "work.txt", "broken.jsonl.gz", "damaged.csv.gz"])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "broken.jsonl.gz").write_bytes(b"no gzip")
    damaged = bytearray(gzip.compress(b"arrival_s,input_tokens,output_tokens\n" + b"0,1,2\n" * 5))
    damaged[10:20] = b"\xff" * 10
    (tmp_path / "damaged.csv.gz").write_bytes(damaged)
    with pytest.raises(WorkloadError, match=name):
        read_workload(tmp_path / name)


@pytest.mark.parametrize("name", ["recorded.jsonl", "recorded.jsonl.gz"])
def test_a_recording_comes_back_as_it_was_written(tmp_path: Path, name: str) -> None:
    expected = Expected(Length(3.0, 0.5), 0.75)
    job = Job("0000001", 0.5, 10, 6, (2, 0, 1), drafted=(4, 0, 1), max_tokens=16, expected=expected)
    write_workload(tmp_path / name, [job])
    (back,) = read_workload(tmp_path / name)
    assert back.expected is not None
    assert back.expected.length is not None
    assert back.expected.length.location == pytest.approx(3.0, abs=1e-3)
    assert replace(back, expected=expected) == job
    first = (tmp_path / name).read_bytes()
    write_workload(tmp_path / name, [job])
    assert (tmp_path / name).read_bytes() == first


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"accepted": [1, 0], "drafted": [1]}, "drafted: must hold as many rounds"),
        ({"accepted": [2], "drafted": [1]}, "none with fewer tokens"),
        ({"expected": {"median_tokens": 9}}, "expected: median_tokens must .* a spread"),
        ({"expected": {"spread": "wide"}}, "expected: must be an object of numbers"),
        ({"expected": {"median_tokens": 9, "spread": 40}}, "expected: median_tokens must .* a spread"),
        ({"expected": {"median_tokens": 10**400, "spread": 1}}, "expected: must be an object of numbers"),
        ({"max_tokens": 0}, "max_tokens: 0 is not a whole number"),
    ],
)
def test_a_bad_recording_is_refused(tmp_path: Path, wrong: dict[str, object], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        read_workload(jsonl(tmp_path, GOOD | wrong))


def test_a_recorded_drafter_proposes_what_it_proposed() -> None:
    job = Job("1", 0.0, 1, 20, (2, 0), drafted=(3, 0))
    assert [job.drafts(round, 4) for round in range(3)] == [3, 0, 3]
    assert job.drafts(0, 1) == 1
    assert job.rounds(4) == 10
