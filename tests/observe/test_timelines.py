"""Where the time of a request goes, told by the changes of its state alone."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from scheduler_service.core.beliefs import Acceptance
from scheduler_service.core.lifecycle import State
from scheduler_service.core.types import Ended, Finish, Record
from scheduler_service.timelines import MOST_SPANS, Timelines
from tests.scheduler.builders import request

PARENT = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
NOT_RECORDED = PARENT[:-2] + "00"

WAITS = Record(
    request=request("r", arrival=10.0),
    state=State.WAITING,
    placement=0,
    emitted=0,
    prefilled=0,
    acceptance=Acceptance(),
    perceptible=False,
    level=1,
    key=0.0,
    preemptions=0,
    started=None,
)
PREFILLS = replace(WAITS, state=State.RUNNING, started=12.0)
RUNS = replace(PREFILLS, emitted=5)
PAUSED = replace(RUNS, state=State.PAUSED)
FINISHED = Ended(replace(RUNS, state=State.FINISHED, emitted=8), Finish.STOP, start=5)


class Spans:
    """In place of protos.tracing.Tracing."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, float]] = []
        self.workers: list[str | None] = []

    def span(self, parent: str, name: str, start_s: float, end_s: float, more: Mapping[str, str] | None = None) -> None:
        assert parent == PARENT
        self.workers.append((more or {}).get("laps_sd.worker"))
        self.seen.append((name, start_s, end_s))


def told(*, parent: str = PARENT) -> tuple[Timelines, list[tuple[str, float, float]]]:
    spans = Spans()
    timelines = Timelines(spans)  # type: ignore[arg-type]
    timelines.submitted(WAITS, 16, parent)
    return timelines, spans.seen


def test_a_request_waits_prefills_runs_is_paused_and_runs_again() -> None:
    timelines, spans = told()
    timelines.changed(PREFILLS, 13.0)
    timelines.changed(RUNS, 14.0)
    timelines.changed(PAUSED, 20.0)
    timelines.changed(RUNS, 23.0)
    timelines.ended(FINISHED, 30.0)
    assert spans == [
        ("queued", 10.0, 12.0),
        ("prefill", 12.0, 14.0),
        ("running 1", 14.0, 20.0),
        ("paused 1", 20.0, 23.0),
        ("running 2", 23.0, 30.0),
    ]
    assert timelines.queue_time.sum == 2.0
    assert timelines.prefill_time.sum == 2.0
    assert timelines.decode_time.sum == 16.0
    assert timelines.inference_time.sum == 18.0
    assert timelines.paused_time.sum == 3.0


def test_the_longest_of_a_requests_pauses_is_told() -> None:
    timelines, _ = told()
    for at, record in ((13.0, RUNS), (14.0, PAUSED), (18.0, RUNS), (20.0, PAUSED), (21.0, RUNS)):
        timelines.changed(record, at)
    timelines.ended(FINISHED, 30.0)
    assert (timelines.longest_pause.sum, timelines.paused_time.sum) == (4.0, 5.0)


def test_a_clock_that_is_set_back_makes_no_pause_shorter_than_none() -> None:
    timelines, _ = told()
    for at, record in ((13.0, RUNS), (14.0, PAUSED), (18.0, RUNS), (3620.0, PAUSED), (21.0, RUNS)):
        timelines.changed(record, at)
    timelines.ended(FINISHED, 30.0)
    assert (timelines.longest_pause.sum, timelines.paused_time.sum) == (4.0, 4.0)


def test_a_span_of_running_names_the_worker() -> None:
    spans = Spans()
    timelines = Timelines(spans)  # type: ignore[arg-type]
    timelines.submitted(WAITS, 16, PARENT)
    timelines.changed(PREFILLS, 13.0, "u")
    timelines.changed(RUNS, 14.0, "u")
    timelines.changed(PAUSED, 20.0, "u")
    timelines.ended(FINISHED, 30.0, "v")
    names = [name for name, *_ in spans.seen]
    assert dict(zip(names, spans.workers, strict=True)) == {
        "queued": None,
        "prefill": "u",
        "running 1": "u",
        "paused 1": None,
    }


def test_the_prediction_of_its_submission_is_compared_with_its_true_length() -> None:
    timelines, _ = told()
    timelines.changed(RUNS, 14.0)
    timelines.ended(FINISHED, 30.0)
    assert (timelines.predicted_over_true.count, timelines.predicted_over_true.sum) == (1, 2.0)


def test_a_request_that_was_cut_has_no_true_length() -> None:
    timelines, _ = told()
    cut = replace(RUNS, request=request("r", arrival=10.0, max_tokens=5), state=State.FINISHED)
    timelines.ended(Ended(cut, Finish.LENGTH, start=4), 30.0)
    assert timelines.predicted_over_true.count == 0


def test_a_pause_goes_on_while_the_kv_is_taken_away() -> None:
    timelines, spans = told()
    timelines.changed(RUNS, 14.0)
    timelines.stopped(["r", "unknown"], 15.0)
    timelines.changed(replace(PAUSED, state=State.WAITING), 16.0)
    assert timelines.longest_pause_s(20.0) == 5.0
    timelines.changed(RUNS, 21.0)
    assert spans[-1] == ("paused 1", 15.0, 21.0)
    assert timelines.longest_pause_s(22.0) == 0.0


def test_the_longest_pause_is_that_of_the_request_that_was_stopped_first() -> None:
    timelines, _ = told()
    timelines.changed(PAUSED, 14.0)
    other = request("s", arrival=11.0)
    timelines.submitted(replace(WAITS, request=other), 16, "")
    timelines.changed(replace(PAUSED, request=other), 15.0)
    assert timelines.longest_pause_s(20.0) == 6.0
    timelines.ended(FINISHED, 20.0)
    assert timelines.longest_pause_s(20.0) == 5.0


def test_a_request_that_is_cancelled_while_it_waits_counts_in_no_time() -> None:
    timelines, spans = told()
    timelines.ended(Ended(replace(WAITS, state=State.CANCELLED), None), 11.0)
    assert spans == [("queued", 10.0, 11.0)]
    assert timelines.queue_time.count == timelines.decode_time.count == 0


def test_of_a_request_of_an_earlier_leader_only_what_this_one_saw_counts() -> None:
    spans = Spans()
    timelines = Timelines(spans)  # type: ignore[arg-type]
    timelines.restored(replace(RUNS, state=State.RUNNING), 100.0, PARENT)
    timelines.changed(RUNS, 103.0)
    timelines.ended(FINISHED, 110.0)
    assert spans.seen == [("paused 1", 100.0, 103.0), ("running 1", 103.0, 110.0)]
    assert timelines.queue_time.sum == 2.0
    assert timelines.decode_time.count == timelines.predicted_over_true.count == 0


def test_a_request_has_a_bounded_number_of_spans() -> None:
    timelines, spans = told()
    now = 14.0
    for _ in range(MOST_SPANS):
        timelines.changed(RUNS, now)
        timelines.changed(PAUSED, now + 1)
        now += 2
    timelines.ended(FINISHED, now)
    assert len(spans) == MOST_SPANS + 1
    name, start, end = spans[-1]
    assert (name, start, end) == ("rest", spans[-2][2], now)


@pytest.mark.parametrize("parent", ["", NOT_RECORDED])
def test_a_request_whose_trace_is_not_recorded_has_none(parent: str) -> None:
    timelines, spans = told(parent=parent)
    timelines.changed(RUNS, 14.0)
    timelines.ended(FINISHED, 30.0)
    assert spans == []
    assert timelines.decode_time.count == 1
