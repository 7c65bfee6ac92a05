"""What `--additional-config` may say, and the sentence for what it may not."""

from pathlib import Path
from typing import Any

import pytest

from laps_sd_vllm.settings import read
from laps_sd_vllm.versions import Unsupported


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lapssd": {"mode": "order"}}, "'lapssd' in --additional-config is nobody's; did you mean 'laps_sd'?"),
        ({"LAPS_SD": {}}, "'LAPS_SD' in --additional-config is nobody's; did you mean 'laps_sd'?"),
        ({"laps_sd": {"polcy": "fcfs"}}, "laps_sd.polcy is not a setting; known: mode"),
        (
            {"laps_sd": {"draft_len": "many"}},
            "laps_sd.draft_len: must be all, auto or a number from 0 to 64, not 'many'",
        ),
        ({"laps_sd": {"draft_len": True}}, "laps_sd.draft_len: must be all, auto or a number"),
        ({"laps_sd": {"draft_len": 65}}, "laps_sd.draft_len: must be all, auto or a number"),
        ({"laps_sd": {"slots": True}}, "laps_sd.slots: Input should be a valid integer"),
        ({"laps_sd": {"learned": "/"}}, "laps_sd.learned: this is a folder, not '/'"),
        ({"laps_sd": {"learned": "~nobody-of-that-name/f"}}, "laps_sd.learned: Could not determine home directory"),
        ({"laps_sd": 3}, "laps_sd must be an object"),
    ],
)
def test_what_is_wrong_is_one_sentence(given: Any, said: str) -> None:
    with pytest.raises(Unsupported) as refused:
        read(given)
    assert said in str(refused.value)


@pytest.mark.parametrize("given", [None, {}, {"laps_sd": {}}, {"another": {"mode": "order"}}])
def test_others_settings_are_left_alone(given: Any) -> None:
    assert read(given).mode == "observe"


def test_what_is_right_is_taken() -> None:
    told = read({"laps_sd": {"draft_len": 4, "slots": 8, "learned": "~/learned"}})
    assert (told.draft_len, told.slots, told.learned) == (4, 8, Path.home() / "learned")
    assert read({"laps_sd": {"draft_len": "auto", "learned": False}}).learned is False
