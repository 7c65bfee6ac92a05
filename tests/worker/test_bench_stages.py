"""The bench over stages: links slow on purpose, texts that must not change, and what a gain is compared with."""

import socket
from argparse import Namespace
from pathlib import Path

import pytest
import typer

from tests.tiny_model import make_tiny_model
from tests.worker.harness import Tiny
from tests.worker.staged import LocalRing, staged_engine
from worker_service.bench import stages
from worker_service.bench.command import app
from worker_service.bench.race import Answer, Batch, Rounds
from worker_service.bench.stages import SlowLinks, measure, point
from worker_service.engine.stages import Call
from worker_service.model_files import ModelError
from worker_service.ring import StageLink

OPTIONS = Namespace(batch=[2], link_delay_ms=[0.0, 5.0], draft_len=None, tokens=16, stages=3)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that links wait, instead of waiting."""
    found: list[float] = []
    monkeypatch.setattr("worker_service.bench.stages.time.sleep", found.append)
    return found


def test_a_pass_waits_for_every_link_of_the_ring_and_other_calls_for_none(slept: list[float]) -> None:
    ends = [socket.socketpair() for _ in range(2)]
    links = SlowLinks([StageLink(_tcp(), f"stage {number}") for number in (1, 2)])
    links._links[-1]._socket = ends[-1][0]
    other = StageLink(_tcp(), "stage 0")
    other._socket = ends[-1][1]
    links.link_s = 0.02
    for name in ("compute", "new_pool"):
        other.send(Call(name, ()))
        assert links.answer().name == name
    assert slept == pytest.approx([0.06])


def _tcp() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM)


class SlowRing(LocalRing):
    link_s = 0.0


def test_each_delay_is_a_point_with_the_same_texts(tmp_path: Path, tiny: Tiny) -> None:
    engine = staged_engine(make_tiny_model(tmp_path, layers=3), 3, max_draft=16)
    prompts = [tiny.prompt("lazy lazy lazy lazy"), tiny.prompt("the tail of the tail of the")]
    points = list(measure(engine, SlowRing([]), OPTIONS, lambda _: [prompts], lambda _: [prompts]))  # type: ignore[arg-type]
    assert [(each["batch"], each["stages"], each["link_ms"]) for each in points] == [(2, 3, 0.0), (2, 3, 5.0)]
    assert all(each["gain"] > 0 and each["tokens_a_round"] > 1 for each in points)


def test_a_text_that_speculation_changes_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lossy:
        def __init__(self, _: object, draft_len: int) -> None:
            self.draft_len = draft_len

        def answer(self, batch: Batch, max_tokens: int) -> Answer:
            return Answer([[self.draft_len]], 1.0, Rounds(1, 1, 1, verify_s=1.0))

    monkeypatch.setattr(stages, "Ours", Lossy)
    with pytest.raises(ModelError, match="changed a text"):
        list(measure(None, SlowRing([]), OPTIONS, lambda _: [[[1]]], lambda _: [[[1]]]))  # type: ignore[arg-type]


def test_the_closed_form_adds_the_links_to_a_round() -> None:
    def of(tokens: int, passes: int, seconds: float) -> list[Answer]:
        return [Answer([], 0.0, Rounds(passes, passes, tokens, verify_s=seconds))]

    # Rounds of 10 ms plain, of 14 ms with 3 tokens in each; two links of 20 ms.
    answers = {"plain": of(30, 30, 0.3), "ours": of(30, 10, 0.14)}
    answers |= {"plain over links": of(30, 30, 1.5), "ours over links": of(30, 10, 0.6)}
    found = point(answers, 2, 20.0)
    assert found["closed_form"] == pytest.approx(3 * 50 / 54)
    assert found["gain"] == pytest.approx(2.5)
    assert found["tokens_a_round"] == 3


@pytest.mark.parametrize("delays", ["-1", "fast", "5,", "2000"])
def test_delays_that_are_none_are_refused(delays: str) -> None:
    with pytest.raises(typer.BadParameter, match="milliseconds"):
        app(["--stages", "2", "--link-delay-ms", delays], standalone_mode=False)
