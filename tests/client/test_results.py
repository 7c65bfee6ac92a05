"""What the server answers, as typed values."""

from dataclasses import fields
from datetime import UTC, datetime, timedelta

import pytest

from laps_sd.client import RequestStatus, Stats
from laps_sd.client.reading import KINDS, chunk, read
from laps_sd.client.results import Chunk
from protos.times import duration, timestamp
from protos.v1 import inference_pb2, status_pb2, types_pb2


@pytest.mark.parametrize("name", [*KINDS, "GenerateResponse"])
def test_no_field_of_the_interface_is_missing(name: str) -> None:
    """A field that is new in protos/v1 is added to laps_sd/client/results.py, too."""
    files = (inference_pb2.DESCRIPTOR, status_pb2.DESCRIPTOR, types_pb2.DESCRIPTOR)
    (described,) = (file.message_types_by_name[name] for file in files if name in file.message_types_by_name)
    assert set(described.fields_by_name) <= {each.name for each in fields(KINDS.get(name, Chunk))}


def test_enums_are_words_times_are_datetimes_and_what_is_not_set_is_none() -> None:
    message = status_pb2.RequestStatus(
        request_id="r",
        state=status_pb2.REQUEST_STATE_PAUSED,
        submit_time=timestamp(100.5),
        queue_time=duration(1.5),
    )
    status = read(RequestStatus, message)
    assert (status.state, status.finish_reason, status.estimated_end_time) == ("paused", None, None)
    assert status.submit_time == datetime.fromtimestamp(100.5, UTC)
    assert status.queue_time == timedelta(seconds=1.5)


def test_what_is_in_a_message_is_read_with_it() -> None:
    message = status_pb2.StatsResponse(
        queue_lengths=[1, 2],
        workers=[status_pb2.WorkerStatus(worker_id="w", slots=4)],
        predictor=status_pb2.PredictorStatus(state=status_pb2.PREDICTOR_STATE_WARM),
    )
    stats = read(Stats, message)
    assert (stats.queue_lengths, stats.workers[0].slots, stats.predictor.state) == ([1, 2], 4, "warm")
    assert stats.backlog_bound is None


def test_a_word_of_a_newer_server_breaks_nothing() -> None:
    assert read(RequestStatus, status_pb2.RequestStatus(state=99)).state == "99"


def test_a_chunk_has_its_rounds_log_probabilities_and_end() -> None:
    message = inference_pb2.GenerateResponse(
        request_id="r",
        text="a",
        token_ids=[5],
        rounds=[types_pb2.Round(tokens=1, drafted=4)],
        logprobs=[types_pb2.Logprob(logprob=-1.0, top_tokens=[5, 6], top_logprobs=[-1.0, -2.0])],
        final=inference_pb2.Final(finish_reason=types_pb2.FINISH_REASON_STOP, queue_time=duration(0.25)),
    )
    made = chunk(message)
    assert (made.token_ids, made.rounds[0].drafted, made.logprobs[0].top) == ([5], 4, [(5, -1.0), (6, -2.0)])
    assert made.final is not None
    assert (made.final.finish_reason, made.final.queue_time) == ("stop", timedelta(seconds=0.25))
    assert chunk(inference_pb2.GenerateResponse()).final is None
