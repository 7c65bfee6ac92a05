"""Fixtures of the worker's tests."""

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from tests.tiny_model import make_tiny_model
from tests.worker.harness import Tiny

torch.set_num_threads(1)
logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Tiny(folder, model, AutoTokenizer.from_pretrained(folder))


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
