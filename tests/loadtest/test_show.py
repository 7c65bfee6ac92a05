"""What a person sees of a load test."""

import io

from rich.console import Console

from laps_sd.loadtest.record import Record, Tally
from laps_sd.loadtest.results import summarise, without_times
from laps_sd.loadtest.show import Bar, table
from tests.loadtest.moved import Scripted, planned, records_of


def printed(results: dict[str, object]) -> str:
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(table(results))
    return captured.get()


def test_live_figures_are_on_the_terminal_while_it_runs() -> None:
    screen = io.StringIO()
    with Bar(10, Console(force_terminal=True, width=120, file=screen)) as bar:
        bar.watch(lambda: Tally(sent=7, completed=4, failed=1, tokens=90, e2el_s=2.0))
    for figure in ("5/10", "2 in flight", "1 failed", "mean 500 ms"):
        assert figure in screen.getvalue()


def test_nothing_is_drawn_where_there_is_no_terminal() -> None:
    screen = io.StringIO()
    with Bar(10, Console(file=screen)) as bar:
        bar.watch(Tally)
    assert screen.getvalue() == ""


def test_the_table_names_what_went_wrong() -> None:
    records = records_of(planned(0, 0), Scripted([(0.2, 1)], held_up_s=5.0, refuses={1: "RESOURCE_EXHAUSTED: full"}))
    shown = printed(summarise(records, {}, ours=False))
    assert "1, 1 (1 RESOURCE_EXHAUSTED)" in shown
    assert "TOO LATE" in shown


def test_where_nothing_completed_there_is_no_time_but_the_reason() -> None:
    refused = Record(0, 0.0, 0.0, end_s=1.0, error="INVALID_ARGUMENT: max_tokens: [/at most 9]")
    results = without_times(summarise([refused], {}, ours=True))
    assert {value for name, value in results.items() if name.endswith(("_ttft_ms", "_e2el_ms"))} == {None}
    shown = printed(results)
    (latency,) = [line for line in shown.splitlines() if line.startswith("latency")]
    assert set(latency.split()[1:]) == {"-"}
    assert refused.error in shown
    assert "acceptance" not in shown


def test_a_narrow_terminal_gets_fewer_columns_and_no_cut_number() -> None:
    results = summarise(records_of(planned(0, 0), Scripted([(0.2, 1), (4000.5, 3)])), {}, ours=False)
    console = Console(width=60, file=io.StringIO())
    with console.capture() as captured:
        console.print(table(results))
    lines = captured.get().splitlines()
    latency = next(line for line in lines if line.startswith("latency"))
    assert all(value.count(".") == 1 for value in latency.split()[1:])
    assert len(latency.split()) == len(lines[0].split())  # of each column a whole number
    assert {"mean", "p99"} <= set(lines[0].split())
