"""What the figures mean."""

import pytest

from laps_sd.loadtest.record import Record, Tally
from laps_sd.loadtest.results import meets, parse_slos, summarise
from tests.loadtest.moved import Scripted, planned, records_of


def test_warm_up_is_left_out_of_the_figures() -> None:
    records = records_of(planned(0, 10, 20, warmup=1), Scripted([(9.0, 1)], [(1.0, 4)]))
    results = summarise(records, {}, ours=False)
    assert (results["completed"], results["duration"], results["mean_e2el_ms"]) == (2, 11, 1000)
    assert results["output_throughput"] == pytest.approx(8 / 11)


def test_a_warm_up_that_was_late_or_crowded_tells_nothing_of_the_rest() -> None:
    late = [Record(n, 0.0, 5.0, sent_s=5.0, end_s=6.0, measured=False) for n in range(3)]
    results = summarise([*late, Record(9, 9.0, 9.0, sent_s=9.0, end_s=10.0)], {}, ours=False)
    assert (results["p99_send_lateness_ms"], results["max_concurrent_requests"], results["kept_up"]) == (0, 1, True)


def test_a_refused_request_waited_for_no_turn() -> None:
    refused = Record(0, 0.0, 7.0, sent_s=7.0, end_s=7.0, error="RESOURCE_EXHAUSTED: full")
    answered = Record(1, 0.0, 1.0, sent_s=1.0, end_s=2.0)
    assert summarise([refused, answered], {}, ours=False)["mean_client_queue_ms"] == 1000


def test_the_longest_gap_between_outputs_is_a_requests_pause() -> None:
    paused, steady = [(0.1, 1), (0.2, 1), (2.0, 1)], [(0.5, 3)]
    results = summarise(records_of(planned(0, 0), Scripted(paused, steady)), {}, ours=False)
    assert (results["mean_pause_ms"], results["p99_pause_ms"]) == pytest.approx((1000, 1980))


def test_goodput_counts_who_meets_every_slo() -> None:
    quick, slow_start, slow_end = [(0.1, 1), (0.2, 1)], [(0.3, 1), (0.1, 1)], [(0.1, 1), (0.9, 1)]
    records = records_of(planned(0, 0, 0), Scripted(quick, slow_start, slow_end))
    slos = parse_slos(["ttft:200", "e2el:500"])
    assert [meets(record, slos) for record in records] == [True, False, False]
    assert summarise(records, slos, ours=False)["request_goodput"] == pytest.approx(1 / 1.0)


def test_what_failed_or_began_late_was_not_answered_in_time() -> None:
    quick, slow_start, slow_end = [(0.5, 1), (0.05, 1)], [(1.1, 1), (0.05, 1)], [(0.5, 1), (0.2, 1)]
    records = records_of(planned(0, 0, 0), Scripted(quick, slow_start, slow_end))
    failed = Record(9, 0.0, 0.0, error="INTERNAL: broken")
    assert summarise([*records, failed], {}, ours=False)["good_share"] == 1 / 4


def test_an_answer_of_one_token_is_in_time_if_that_token_is() -> None:
    records = records_of(planned(0), Scripted([(0.5, 1)]))
    records[0].end_s += 0.001
    assert summarise(records, {}, ours=False)["good_share"] == 1


def test_a_failed_request_meets_no_slo() -> None:
    assert not meets(Record(0, 0.0, 0.0, error="INTERNAL: broken"), {})


@pytest.mark.parametrize("text", ["itl:5", "ttft", "ttft:fast", "ttft:0", "ttft:-1", "ttft:nan"])
def test_a_wrong_slo_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"ttft|none of"):
        parse_slos([text])


def test_the_busiest_second_and_the_most_in_flight() -> None:
    records = records_of(planned(0, 0.2, 3), Scripted([(0.5, 2), (0.4, 3), (1.0, 9)], [(0.1, 4)]))
    results = summarise(records, {}, ours=False)
    assert results["max_output_tokens_per_s"] == 9
    assert results["max_concurrent_requests"] == 2


def test_speculation_is_summed_over_requests_before_it_is_divided() -> None:
    few = Record(0, 0.0, 0.0, end_s=1.0, drafts=1, drafted=4, accepted=4, preemptions=3)
    many = Record(1, 0.0, 0.0, end_s=1.0, drafts=9, drafted=36, accepted=6)
    results = summarise([few, many], {}, ours=True)
    assert results["spec_decode_acceptance_rate"] == 25
    assert results["spec_decode_acceptance_length"] == 2
    assert results["preemptions_per_request"] == 1.5


def test_acceptance_by_position_is_of_all_drafting_rounds() -> None:
    record = Record(0, 0.0, 0.0, end_s=1.0, rounds=[(1, 0, 0), (3, 2, 2), (2, 2, 1), (1, 1, 0), (1, 3, 0)])
    assert summarise([record], {}, ours=True)["spec_decode_per_position_acceptance_rates"] == [0.5, 0.25, 0]


def test_a_server_that_does_not_speculate_is_given_no_such_figures() -> None:
    assert not any("spec" in name or "preempt" in name for name in summarise([], {}, ours=False))


def test_totals_of_drivers_add_up() -> None:
    assert Tally(1, 2, 3, 4, 5.0) + Tally(1, 1, 1, 1, 1.0) == Tally(2, 3, 4, 5, 6.0)
