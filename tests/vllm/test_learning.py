"""Lessons are kept, whenever the process ends. vLLM is not needed for that."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laps_sd_vllm import learning
from laps_sd_vllm.background import Background, write_whole
from laps_sd_vllm.learning import SAVE_EVERY_S, Learning
from scheduler_service.core.beliefs import FleetAcceptance, FleetLength
from scheduler_service.learned import Learned, decode
from scheduler_service.predictor.model import HEADS, Model
from scheduler_service.predictor.window import COLUMNS, Example, Snapshot, hashed


class ByHand(Background):
    """Nothing is done until a test does it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[Callable[[], Any]] = []

    def start(self, name: str, job: Callable[[], Any], *, process: bool = False) -> bool:
        self.begun.append(job)
        return True


class Disk:
    """Counts what is written. `full`: nothing can be."""

    def __init__(self) -> None:
        self.writes, self.full = 0, False

    def write(self, file: Path, content: bytes) -> None:
        if self.full:
            raise OSError("no space left")
        self.writes += 1
        write_whole(file, content)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(learning, "write_whole", disk.write)
    return disk


def finish(learning: Learning, now: float) -> None:
    learning.length.observe(9, None, cut=False)
    learning.finished(None, 9, 0, 0, cut=False, now=now)


def kept(file: Path) -> int:
    return decode(file.read_bytes()).length.finished


def learns(file: Path, background: Background, say: Callable[[str], None] = print) -> Learning:
    return Learning(background, file, False, "a model/none", 0, say)


def test_the_end_writes_the_newest_though_an_older_save_is_still_to_come(tmp_path: Path, disk: Disk) -> None:
    file, background = tmp_path / "kept.learned", ByHand()
    ends = learns(file, background)
    finish(ends, 100.0)
    assert len(background.begun) == 1
    finish(ends, 101.0)
    ends.close()
    assert (kept(file), disk.writes) == (2, 1)
    background.begun[0]()
    assert (kept(file), disk.writes) == (2, 1)


def test_a_save_that_did_not_come_to_be_done_is_made_up_for(tmp_path: Path, disk: Disk) -> None:
    file = tmp_path / "kept.learned"
    ends = learns(file, ByHand())
    finish(ends, 100.0)
    ends.close()
    assert (kept(file), disk.writes) == (1, 1)


def test_a_save_that_failed_is_tried_again_at_the_end(tmp_path: Path, disk: Disk) -> None:
    file, background, told = tmp_path / "kept.learned", ByHand(), list[str]()
    ends = learns(file, background, told.append)
    finish(ends, 100.0)
    disk.full = True
    ends.leave()
    background.begun[1]()
    assert told == ["what was learned is not kept: no space left"]
    disk.full = False
    ends.close()
    assert kept(file) == 1


def test_what_is_written_already_is_not_written_again(tmp_path: Path, disk: Disk) -> None:
    file, background = tmp_path / "kept.learned", ByHand()
    ends = learns(file, background)
    finish(ends, 100.0)
    background.begun[0]()
    ends.leave()
    background.begun[1]()
    ends.close()
    assert disk.writes == 1
    again = learns(file, background)
    again.close()
    assert disk.writes == 1
    finish(again, 200.0 + SAVE_EVERY_S)
    again.close()
    assert (kept(file), disk.writes) == (2, 2)


ROW = hashed({"a word": 1.0})


def taught(file: Path, served: str) -> None:
    """By 40 requests, of whose drafts a fifth was accepted."""
    offsets = np.array([2.0, 0.0, 0.2])
    tells = np.array([True, True])
    model = Model(np.zeros((HEADS, COLUMNS), np.float32), offsets, np.array([-1.0, 1.0]), tells, 40, 40)
    examples = Snapshot((Example(ROW, 9, 10, 2),) * 40, 40)
    file.write_bytes(Learned(FleetLength(), FleetAcceptance.at(4), examples, model, 3, served=served).encode())


def test_what_a_predictor_learned_outlives_a_start_without_one(tmp_path: Path) -> None:
    taught(file := tmp_path / "kept.learned", "a model/none")
    without = learns(file, ByHand())
    finish(without, 100.0)
    without.close()
    left = decode(file.read_bytes())
    assert left.model is not None
    assert (left.length.finished, left.examples.finished, len(left.examples.examples), left.version) == (1, 40, 40, 3)


def test_of_other_drafts_a_predictor_knows_lengths_alone(tmp_path: Path) -> None:
    taught(file := tmp_path / "kept.learned", "a model/ngram")
    same, other = (Learning(ByHand(), file, True, served, 4, print) for served in ("a model/ngram", "a model/eagle"))
    (expected, without) = same.expect(ROW), other.expect(ROW)
    assert expected is not None
    assert without is not None
    assert (expected.length, expected.acceptance) == (without.length, pytest.approx(0.2))
    assert without.acceptance is None
    assert other.predictor is not None
    assert {each[1:] for each in other.predictor.known().examples} == {(9, 0, 0, False)}
