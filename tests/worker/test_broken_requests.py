"""Requests whose keys and values are no numbers: they end with an error, and nobody else is the worse for it."""

import math
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from tests.gpu.repeated import Repeated
from tests.worker.harness import Driver, Tiny
from tests.worker.test_graphs import Numbers
from worker_service.engine import graphs
from worker_service.engine.drafting.drafter import NoDrafter
from worker_service.engine.graphs import Graphs, Size
from worker_service.engine.types import Finish, Limits, Run


@pytest.fixture(autouse=True)
def no_graphs_here() -> Iterator[None]:
    with patch.object(Graphs, "kind", Repeated):
        yield


BROKEN = 5  # a token whose keys and values are no numbers


def breakable(tiny: Tiny, attention: str, blocks: int) -> Driver:
    driver = Driver(tiny.engine(attention=attention, blocks=blocks, drafter=NoDrafter()))
    embedding = driver.engine.target._model.get_input_embeddings()
    embedding.register_forward_hook(lambda _, ids, out: out.masked_fill((ids[0] == BROKEN)[..., None], torch.nan))
    return driver


@pytest.mark.parametrize("attention", ["torch", "graphs"])
def test_what_a_broken_request_leaves_in_memory_reaches_no_other(tiny: Tiny, attention: str) -> None:
    """The next request has its blocks."""
    prompt, limits = tiny.prompt("The quick brown fox"), Limits(max_tokens=12, ignore_eos=True)
    driver = breakable(tiny, attention, blocks=6)
    driver.admit("broken", [BROKEN] * 40, limits)
    driver.finish_all()
    driver.forget_all()
    driver.admit("next", prompt, limits)
    driver.finish_all()
    assert driver.finished == {"broken": Finish.ERROR, "next": Finish.LENGTH}
    alone = Driver(tiny.engine())
    alone.admit("next", prompt, limits)
    alone.finish_all()
    assert driver.outputs["next"] == alone.outputs["next"]


@pytest.mark.parametrize("attention", ["torch", "graphs"])
def test_beside_a_broken_request_others_go_on(tiny: Tiny, attention: str) -> None:
    """Also where a round is padded: its padding attends to the broken one."""
    limits = Limits(max_tokens=12, ignore_eos=True)
    driver = breakable(tiny, attention, blocks=64)
    driver.admit("good", list(range(10, 40)), limits)
    driver.step([Run("good", 0, 16)])
    driver.admit("broken", [BROKEN] * 9, limits)
    driver.step([Run("good", 0, 5), Run("broken", 0, 3)])
    driver.finish_all()
    assert driver.finished == {"broken": Finish.ERROR, "good": Finish.LENGTH}


def test_what_padding_of_a_broken_text_leaves_reaches_no_later_request(tiny: Tiny) -> None:
    """In a graph it writes to the spare block, and later texts are padded, too."""
    driver = breakable(tiny, "graphs", blocks=64)
    driver.admit("short", list(range(10, 18)), Limits(max_tokens=1, ignore_eos=True))
    driver.admit("broken", [BROKEN] * 3, Limits(max_tokens=12, ignore_eos=True))
    driver.step([Run("short", 0, 8), Run("broken", 0, 3)])
    driver.forget_all()
    driver.admit("later", list(range(10, 40)), Limits(max_tokens=12, ignore_eos=True))
    driver.finish_all()
    assert driver.finished["later"] is Finish.LENGTH


def test_a_broken_text_does_not_end_all_graphs() -> None:
    class Broken(Numbers):
        def compute(self, given: graphs.PaddedRound, size: Size) -> graphs.Results:
            logits, hidden, _ = super().compute(given, size)
            return logits * torch.nan, hidden, None

    broken = Broken()
    assert math.isnan(broken.run(1)[0])
    assert len(broken.graphs._known) == 1
