"""What a frame tells: figures and ids, with rates, and no text."""

import json
from typing import Any

from gateway.page.frames import RATES_OVER_S, Frames, comparison
from protos.times import duration, timestamp
from protos.v1 import inference_pb2, status_pb2
from tests.gateway.page.pages import waiting

NOBODY = inference_pb2.ListRequestsResponse()


def stats(at: float, tokens: int = 0, **more: Any) -> status_pb2.StatsResponse:
    workers = [status_pb2.WorkerStatus(worker_id="w", slots=2, blocks=10, free_blocks=4, output_tokens=tokens)]
    return status_pb2.StatsResponse(read_time=timestamp(at), output_tokens=tokens, workers=workers, **more)


def frame(frames: Frames, *args: Any) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(frames.frame(*args))
    return told


def test_a_request_is_told_by_figures_and_by_why_it_waits() -> None:
    told = frame(Frames(), stats(100.0), inference_pb2.ListRequestsResponse(requests=[waiting()]))
    (request,) = told["requests"]
    assert (request["state"], request["reason"], request["passed_by"]) == ("paused", "claim", ["b"])
    assert request["recent"] == [[3, 4, 2], [1, 4, 0]]
    assert (request["age_s"], request["queued_s"], request["ends_in_s"], request["starts_in_s"]) == (
        10.0,
        1.5,
        3.0,
        None,
    )


def test_workers_that_load_or_drain_are_told() -> None:
    draining = status_pb2.WorkerStatus(worker_id="w", slots=2, draining=True)
    now = status_pb2.StatsResponse(read_time=timestamp(100.0), workers=[draining], loading_workers=["next"])
    told = frame(Frames(), now, NOBODY)
    assert (told["workers"][0]["draining"], told["loading"]) == (True, ["next"])


def test_a_request_that_runs_has_no_reason() -> None:
    running = waiting(state=status_pb2.REQUEST_STATE_RUNNING, wait_reason=0, passed_by=[])
    (request,) = frame(Frames(), stats(100.0), inference_pb2.ListRequestsResponse(requests=[running]))["requests"]
    assert (request["reason"], request["passed_by"]) == ("", [])


def test_rates_are_over_the_last_seconds() -> None:
    frames = Frames()
    assert frame(frames, stats(100.0), NOBODY)["rates"]["output_tokens"] is None
    frame(frames, stats(101.0, 50), NOBODY)
    told = frame(frames, stats(102.0, 80, num_draft_tokens=40, num_accepted_tokens=10), NOBODY)
    assert (told["rates"]["output_tokens"], told["rates"]["acceptance"]) == (40.0, 0.25)
    assert (told["workers"][0]["tokens_per_s"], told["workers"][0]["kv"]) == (40.0, 0.6)
    told = frame(frames, stats(101.0 + RATES_OVER_S, 110), NOBODY)  # the first frame is too old by now
    assert told["rates"]["output_tokens"] == 20.0


def test_another_leader_counts_anew() -> None:
    frames = Frames()
    frame(frames, stats(100.0, 500, epoch=1), NOBODY)
    assert frame(frames, stats(101.0, 3, epoch=2), NOBODY)["rates"]["output_tokens"] is None


def test_acceptance_is_that_of_old_while_nothing_runs() -> None:
    frames = Frames()
    for at in (100.0, 101.0):
        told = frame(frames, stats(at, num_draft_tokens=10, num_accepted_tokens=5), NOBODY)
    assert told["rates"]["acceptance"] == 0.5


def test_policies_come_the_best_first() -> None:
    figures = [
        status_pb2.PolicyFigures(policy=name, mean_latency=duration(mean_s), p99_latency=duration(9), preemptions=0.126)
        for name, mean_s in (("fcfs", 4.0), ("gittins", 2.5))
    ]
    told = comparison(inference_pb2.ComparePoliciesResponse(policies=figures, running_policy="gittins"))
    assert [one["policy"] for one in told["policies"]] == ["gittins", "fcfs"]
    assert told["policies"][0] == {"policy": "gittins", "mean_s": 2.5, "p99_s": 9.0, "first_token_s": 0, "pauses": 0.13}
    assert (told["made_at"], told["computing"]) == (None, False)
