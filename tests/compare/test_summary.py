"""What runs amount to, in figures and words."""

import re

import pytest
from rich.console import Console

from laps_sd.compare.design import BASE, BURST, Cell, Run
from laps_sd.compare.show import table
from laps_sd.compare.summary import sentences, summarise
from tests.compare.builders import found

CELL = Cell(2, "0.85")
SLOW, FAST = [2.0, 4.0] * 24, [1.0, 2.0] * 24
CAPACITY = [found(Run(Cell(2, BURST), BASE, r), SLOW) for r in (1, 2)]


def of(policy: str, latencies_s: list[float], repetition: int = 1, **more: object) -> dict[str, object]:
    return found(Run(CELL, policy, repetition), latencies_s, **more)  # type: ignore[arg-type]


def test_latencies_are_compared_request_by_request() -> None:
    summary = summarise([*CAPACITY, of("fcfs", SLOW), of("gittins", FAST), of("las", SLOW)], 4)
    (cell, _) = summary["cells"]
    rows = cell["policies"]
    assert list(rows) == ["fcfs", "las", "gittins"]
    assert rows["gittins"]["ratio"] == {"value": 0.5, "low": 0.5, "high": 0.5, "verdict": "lower"}
    assert rows["gittins"]["e2el_ms"]["mean"] == 1500
    assert rows["gittins"]["e2el_ms_by_kind"] == {"chat": 1000, "code": 2000}
    assert cell["against_ours"]["las"]["verdict"] == "lower"


def test_answers_count_as_in_time_over_all_repetitions() -> None:
    """Twenty tokens after the first may take two seconds."""
    runs = [of("fcfs", SLOW, tokens=21), of("fcfs", FAST, 2, tokens=21)]
    (cell, _) = summarise([*CAPACITY, *runs], 4)["cells"]
    assert cell["policies"]["fcfs"]["good_share"] == (24 + 48) / (2 * 48)


def test_only_repetitions_that_both_have_are_compared() -> None:
    runs = [of("fcfs", SLOW), of("fcfs", [9.0] * 48, 2), of("las", FAST)]
    (cell, _) = summarise([*CAPACITY, *runs], 4)["cells"]
    assert cell["policies"]["las"]["ratios"] == [0.5]


def test_a_burst_that_was_run_for_a_capacity_alone_is_no_part_of_a_comparison() -> None:
    fast = found(Run(Cell(2, BURST), "las", 1), FAST)
    other = found(Run(Cell(2, BURST), BASE, 2), [9.0] * 48)
    (cell,) = summarise([CAPACITY[0], other, fast], 4)["cells"]
    assert cell["policies"]["fcfs"]["e2el_ms"]["mean"] == 3000
    assert cell["policies"]["fcfs"]["repetitions"] == 1
    (cell,) = summarise([CAPACITY[0], other], 4)["cells"]
    assert cell["policies"]["fcfs"]["repetitions"] == 2


def test_it_says_where_policies_do_not_differ_and_where_ours_is_slower() -> None:
    words = list(sentences(summarise([*CAPACITY, of("fcfs", SLOW), of("las", SLOW), of("gittins", [5.0] * 48)], 4)))
    assert any(text.startswith("2 slots, load 0.85: no difference between las and fcfs") for text in words)
    assert any("gittins is slower than las" in text for text in words)


def test_disturbed_runs_are_left_out_and_named() -> None:
    runs = [*CAPACITY, of("fcfs", SLOW), of("las", FAST, faults=("a stall",))]
    summary = summarise(runs, 4)
    assert "las" not in summary["cells"][0]["policies"]
    assert any("las, since a stall" in text for text in sentences(summary))
    kept = summarise(runs, 4, faulty=True)
    assert kept["cells"][0]["policies"]["las"]["faults"] == 1


@pytest.mark.parametrize("what", [{"error": "RESOURCE_EXHAUSTED: full"}, {"steady_s": None}])
def test_a_run_with_a_failed_or_unseen_request_never_counts(what: dict[str, object]) -> None:
    failed = of("las", FAST, faults=("1 requests failed",))
    failed["requests"][0] |= what  # type: ignore[index]
    summary = summarise([*CAPACITY, of("fcfs", SLOW), failed], 4, faulty=True)
    assert "las" not in summary["cells"][0]["policies"]


def test_loads_of_another_capacity_are_left_out() -> None:
    other = [found(Run(Cell(2, BURST), BASE, 1), SLOW)]
    other[0]["results"]["request_throughput"] = 3.0
    summary = summarise([*other, of("fcfs", SLOW)], 4)
    assert summary["left_out"][0]["faults"] == ["the capacity was measured anew since"]


def test_answers_that_differ_in_length_are_counted() -> None:
    runs = [*CAPACITY, of("fcfs", SLOW), of("las", SLOW, tokens=6)]
    summary = summarise(runs, 4)
    assert summary["cells"][0]["lengths"] == {"answers": 48, "differ": 48}
    assert any("48 of 48 answers differ in length" in text for text in sentences(summary))


def test_the_simulator_predicts_from_recorded_rounds_and_steps() -> None:
    """Five rounds of 10 ms each, nobody waits: 50 ms, whatever was measured."""
    (cell, _) = summarise([*CAPACITY, of("fcfs", SLOW)], 4)["cells"]
    row = cell["policies"]["fcfs"]
    assert row["predicted_mean_ms"] == pytest.approx(50, rel=0.05)
    assert cell["oracle"]["predicted_ratio"] == row["equal_speed_ratio"] == pytest.approx(1)
    assert cell["step_costs"]["t_verify_ms"] + cell["step_costs"]["t_token_ms"] == pytest.approx(10)


def test_at_equal_speed_the_same_repetitions_are_compared_too() -> None:
    crowded = of("fcfs", SLOW, 2, tokens=300)  # las would be slower there
    (cell, _) = summarise([*CAPACITY, of("fcfs", SLOW), crowded, of("las", SLOW)], 4)["cells"]
    assert cell["policies"]["las"]["equal_speed_ratio"] == pytest.approx(1)


def test_the_table_says_how_many_runs_there_were_where_policies_differ() -> None:
    runs = [of("fcfs", SLOW), of("fcfs", SLOW, 2), of("las", SLOW)]
    (cell, burst) = summarise([*CAPACITY, *runs], 4)["cells"]
    assert re.findall(r"(policy|fcfs|las) +(runs|\d) ", text_of(cell)) == [
        ("policy", "runs"),
        ("fcfs", "2"),
        ("las", "1"),
    ]
    assert "runs" not in text_of(burst)
    assert "2 slots, load 0.85: 48 to 96 requests a policy" in text_of(cell)
    assert "2 slots, burst: 96 requests a policy" in text_of(burst)


def test_a_burst_needs_no_capacity() -> None:
    runs = [found(Run(Cell(2, BURST), policy, 1), SLOW) for policy in (BASE, "las")]
    runs[0]["results"]["request_throughput"] = 3.0
    assert summarise(runs, 4)["left_out"] == []


def test_a_load_that_is_a_share_of_another_machines_capacity_is_told() -> None:
    moved = {"machine": {"processor": "abacus", "cores": 64}}
    runs = [*CAPACITY, of("fcfs", SLOW) | moved, of("las", SLOW) | moved]
    assert "2 slots, load 0.85: one repetition was made on 2 machines" in " ".join(sentences(summarise(runs, 4)))


def test_each_repetition_may_have_a_machine_of_its_own() -> None:
    moved = {"machine": {"processor": "abacus", "cores": 64}}
    runs = [found(Run(Cell(2, BURST), policy, repetition), SLOW) for policy in (BASE, "las") for repetition in (1, 2)]
    summary = summarise([run | moved if run["run"]["repetition"] == 2 else run for run in runs], 4)
    assert "machines" not in " ".join(sentences(summary))


def text_of(cell: dict[str, object]) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(cell))
    return capture.get()


def test_a_run_whose_capacity_was_disturbed_was_not_at_its_load() -> None:
    disturbed = found(Run(Cell(2, BURST), BASE, 1), SLOW, faults=("a stall",))
    summary = summarise([disturbed, of("fcfs", SLOW)], 4)
    assert summary["cells"] == []
    assert {"run": "slots2-0.85-repetition1-fcfs", "faults": ["its capacity was disturbed"]} in summary["left_out"]
