"""The table in seconds is made of the runs that there are, and says what they say. vLLM is not needed for that."""

import json
from typing import Any

import pytest

from tests.vllm.compare_page import FIGURES, PAGE, Key, Lines, beside_earlier, section, summary

NONE = summary({})


def served(latency_s: float, count: int = 40) -> dict[str, Any]:
    """Answers of ten tokens, all after so long."""
    at = [float(number) for number in range(count)]
    last = [each + latency_s for each in at]
    return {
        "arrival": at,
        "first": last,
        "last": last,
        "pause": [0.0] * count,
        "tokens": [10] * count,
        "came": 0.8,
        "waited": 0.5,
    }


def loads(stock: float, order: float) -> Lines:
    return {Key("4 slots", 4, "stock", 0.9): served(stock), Key("4 slots", 4, "order", 0.9): served(order)}


def test_the_page_is_made_of_the_figures() -> None:
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else NONE
    assert section(figures) in PAGE.read_text()


def test_where_every_answer_takes_half_as_long_the_ratio_is_a_half() -> None:
    (cell,) = summary(loads(4.0, 2.0))["loads"]
    assert (cell["requests"], cell["runs"]) == (40, 1)
    assert cell["figures"]["mean s"] == {"stock": 4.0, "ours": 2.0, "ratio": pytest.approx([0.5, 0.5, 0.5])}
    assert cell["figures"]["somebody waits % of the time"] == {"stock": 50.0, "ours": 50.0, "ratio": None}


def test_good_answers_begin_within_a_second() -> None:
    (cell,) = summary(loads(1.5, 0.5))["loads"]
    good = cell["figures"]["good answers %"]
    assert (good["stock"], good["ours"], good["ratio"]) == (0.0, 100.0, None)


def test_a_run_whose_partner_is_missing_says_nothing() -> None:
    lines = loads(4.0, 2.0)
    del lines[Key("4 slots", 4, "order", 0.9)]
    assert section(summary(lines)) == section(NONE) == "Not measured yet.\n"


def test_bursts_are_compared_round_by_round() -> None:
    """The machine got slower from round to round; the ratio did not."""
    lines: Lines = {}
    for number, rate in enumerate((100.0, 50.0, 25.0)):
        lines[Key("saturation", 32, "stock", number=number)] = {"tokens_per_s": rate}
        lines[Key("saturation", 32, "order", number=number)] = {"tokens_per_s": 0.9 * rate}
    (burst,) = summary(lines)["bursts"]
    assert burst["ratio"] == pytest.approx([0.9, 0.9, 0.9])
    assert "|tokens/s, ordering|58|52|0.900 (0.900 to 0.900)|" in section(summary(lines))


def test_a_run_in_which_laps_sd_fell_back_is_told() -> None:
    lines = loads(4.0, 2.0)
    lines[Key("4 slots", 4, "order", 0.9)]["fell_back"] = "3 plans in a row took over 5 ms"
    assert "LAPS-SD left the order to vLLM in a run: 3 plans in a row took over 5 ms." in section(summary(lines))


def test_rows_that_were_not_measured_anew_stay_and_say_that_older_code_made_them() -> None:
    earlier = summary(loads(4.0, 2.0), code="old")
    lines: Lines = {Key("8 slots", 8, kind, 0.9): served(1.0) for kind in ("stock", "order")}
    both = beside_earlier(summary(lines, code="new"), earlier)
    assert [(row["cell"], row["code"]) for row in both["loads"]] == [("8 slots", "new"), ("4 slots", "old")]
    table = section(both)
    assert "|4 slots, load 0.9, 40 requests in 1 runs (earlier code)|" in table
    assert "|8 slots, load 0.9, 40 requests in 1 runs|" in table


def test_a_row_that_was_measured_anew_takes_the_place_of_the_earlier_one() -> None:
    both = beside_earlier(summary(loads(4.0, 3.0), code="new"), summary(loads(4.0, 2.0), code="old"))
    (row,) = both["loads"]
    assert (row["code"], row["figures"]["mean s"]["ours"]) == ("new", 3.0)


def test_rows_of_another_machine_are_left_out() -> None:
    earlier = summary(loads(4.0, 2.0)) | {"machine": "another"}
    assert beside_earlier(NONE, earlier)["loads"] == []
