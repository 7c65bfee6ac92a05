"""Checkpoints of a head's training: damaged, unreadable or of another head, each is refused with a sentence."""

from pathlib import Path

import pytest
import torch

from worker_service.distill.train import Trainer
from worker_service.engine.drafting.head import DraftHead, DraftHeadConfig
from worker_service.model_files import ModelError


def small_trainer(draft_tokens: int) -> Trainer:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "draft_tokens": draft_tokens}
    head, table = DraftHead(DraftHeadConfig(target="t", vocabulary="v", **sizes)), torch.zeros(50, 8)
    return Trainer(head, table, table, unroll=1, learning_rate=0.1)


@pytest.mark.parametrize("left", [0, 100, -1])
def test_a_checkpoint_that_is_cut_short_is_named(left: int, tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    small_trainer(20).save(file)
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(ModelError, match=f"{file} is damaged"):
        small_trainer(20).load(file)


def test_a_checkpoint_that_cannot_be_read_is_not_said_to_be_damaged(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"cannot read {tmp_path}: Is a directory"):
        small_trainer(20).load(tmp_path)


def test_a_checkpoint_of_a_head_of_another_size_is_refused(tmp_path: Path) -> None:
    small_trainer(20).save(tmp_path / "checkpoint.pt")
    with pytest.raises(ModelError, match="--draft-tokens"):
        small_trainer(40).load(tmp_path / "checkpoint.pt")
