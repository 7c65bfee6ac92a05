"""When requests are sent and what counts as their latency, under a clock that is moved."""

import pytest

from laps_sd.loadtest.results import summarise
from tests.loadtest.moved import Scripted, planned, records_of


def test_an_arrival_never_waits_for_an_answer() -> None:
    records = records_of(planned(0, 1, 2, 2), Scripted([(3600.0, 1)]))
    assert [record.sent_s for record in records] == [0, 1, 2, 2]
    assert [record.end_s for record in records] == [3600, 3601, 3602, 3602]


def test_latencies_are_those_of_vllm_but_from_the_arrival_on() -> None:
    (record,) = records_of(planned(5.0), Scripted([(0.5, 1), (0.2, 3), (0.4, 2)]))
    assert (record.ttft_s, record.e2el_s) == pytest.approx((0.5, 1.1))
    assert record.itls_s == pytest.approx([0.2, 0.4])
    assert record.tpot_s == pytest.approx(0.6 / 5)


def test_one_token_has_no_time_per_further_token() -> None:
    (record,) = records_of(planned(0), Scripted([(0.5, 1)]))
    assert record.tpot_s is None
    assert summarise([record], {}, ours=False)["mean_tpot_ms"] == 0


def test_waiting_for_a_place_under_the_cap_is_latency() -> None:
    target = Scripted([(2.0, 1)])
    records = records_of(planned(0, 1, 1), target, concurrency=1)
    assert target.most_live == 1
    assert [record.sent_s for record in records] == [0, 2, 4]
    assert [record.e2el_s for record in records] == [2, 3, 5]
    assert [record.free_s - record.due_s for record in records] == [0, 1, 3]
    assert all(record.lateness_s == 0 for record in records)


def test_in_a_closed_loop_a_request_arrives_when_a_place_falls_vacant() -> None:
    target = Scripted([(2.0, 1)], [(5.0, 1)], [(1.0, 1)])
    records = records_of(planned(None, None, None, None), target, concurrency=2)
    assert [record.due_s for record in records] == [0, 0, 2, 3]
    assert [record.e2el_s for record in records] == [2, 5, 1, 1]


def test_a_closed_loop_begins_at_the_start_that_all_drivers_share() -> None:
    records = records_of(planned(None, None), Scripted([(2.0, 1)]), concurrency=1, start=0.25)
    assert [(record.due_s, record.sent_s) for record in records] == [(0, 0), (2, 2)]


def test_a_driver_that_falls_behind_says_so() -> None:
    records = records_of(planned(*(i / 100 for i in range(50))), Scripted([(0.0, 1)], held_up_s=0.05))
    results = summarise(records, {}, ours=False)
    assert not results["kept_up"]
    assert results["p99_send_lateness_ms"] > 1000


def test_a_driver_that_keeps_up_says_so() -> None:
    records = records_of(planned(*(i / 100 for i in range(50))), Scripted([(9.0, 1)], held_up_s=0.005))
    assert summarise(records, {}, ours=False)["kept_up"]


def test_what_is_late_is_measured_by_what_it_changes() -> None:
    def kept_up(answer_s: float) -> bool:
        records = records_of(planned(0, 0, 0), Scripted([(answer_s, 1)], held_up_s=0.05))
        return bool(summarise(records, {}, ours=False)["kept_up"])

    assert kept_up(answer_s=60.0)
    assert kept_up(answer_s=4.0)  # as sixty short requests at once, which take a fortieth of their latency to send
    assert not kept_up(answer_s=1.0)


def test_a_refused_request_has_failed_and_stops_nobody() -> None:
    records = records_of(planned(0, 0, 0), Scripted([(1.0, 1)], refuses={1: "RESOURCE_EXHAUSTED: full"}))
    results = summarise(records, {}, ours=False)
    assert (results["completed"], results["failed"]) == (2, 1)
    assert results["errors"] == {"RESOURCE_EXHAUSTED": 1}
