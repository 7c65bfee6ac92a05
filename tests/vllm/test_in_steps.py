"""Counting in steps goes by the plug-in's own parts: where these change, the figures must still come out."""

import pytest

pytest.importorskip("vllm")

from scheduler_service.predictor.window import Window
from tests.vllm import in_steps
from tests.vllm.in_steps import CELLS, requests, run

MANY = 60  # enough for the predictor to be fitted once


def test_lengths_are_learned_while_steps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[Window] = []
    monkeypatch.setattr(in_steps, "fit", lambda window, fit=in_steps.fit: fits.append(window) or fit(window))
    asked = requests(MANY, 1)
    served = run(CELLS[2], 8, "learned", asked, [0.0] * MANY).served
    assert fits
    assert [len(each.got) > 0 for each in served] == [True] * MANY
