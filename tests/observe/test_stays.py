"""Spans of requests on a worker, told by the messages of its link."""

from collections.abc import Mapping

from protos.link.v1 import worker_link_pb2 as pb
from protos.v1 import types_pb2
from worker_service.stays import Stays

PARENT = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"


class Spans:
    """In place of protos.tracing.Tracing."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float, dict[str, object]]] = []

    def span(self, parent: str, name: str, start_s: float, end_s: float, told: Mapping[str, object]) -> None:
        assert (parent, name) == (PARENT, "worker")
        self.seen.append((start_s, end_s, {key.removeprefix("laps_sd."): value for key, value in told.items()}))


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def stays() -> tuple[Stays, Clock, Spans]:
    clock, spans = Clock(), Spans()
    kept = Stays(spans, "w", clock)  # type: ignore[arg-type]
    kept.commanded(pb.StepCommand(admit=[pb.Admit(request_id="a", traceparent=PARENT), pb.Admit(request_id="b")]))
    return kept, clock, spans


def test_a_request_that_ends_here_has_one_span_with_what_it_did() -> None:
    kept, clock, spans = stays()
    kept.reported(pb.StepReport(rows=[pb.Row(request_id="a", tokens=[1], prefilled=5), pb.Row(request_id="b")]))
    several = {"tokens_per_round": [2, 1], "drafted_per_round": [4, 4], "accepted_per_round": [1, 0]}
    clock.now = 12.0
    finish = types_pb2.FINISH_REASON_STOP
    last = pb.Row(request_id="a", tokens=[1, 2, 3], drafted=8, accepted=1, finish=finish, **several)  # type: ignore[arg-type]
    kept.reported(pb.StepReport(rows=[last]))
    ((start, end, told),) = spans.seen
    assert (start, end) == (10.0, 12.0)
    assert told == {
        "worker": "w",
        "rounds": 3,
        "output_tokens": 4,
        "prefilled_tokens": 5,
        "drafted_tokens": 8,
        "accepted_tokens": 1,
    }


def test_a_request_that_goes_elsewhere_has_a_span_of_its_stay() -> None:
    kept, clock, spans = stays()
    clock.now = 11.0
    kept.commanded(pb.StepCommand(forget=["a", "b"]))
    assert [span[:2] for span in spans.seen] == [(10.0, 11.0)]


def test_the_end_of_the_connection_ends_all_stays() -> None:
    kept, _, spans = stays()
    kept.detached()
    kept.detached()
    assert len(spans.seen) == 1


def test_without_tracing_nothing_is_kept() -> None:
    kept = Stays(None, "w")
    kept.commanded(pb.StepCommand(admit=[pb.Admit(request_id="a", traceparent=PARENT)]))
    assert not kept._stays
    kept.reported(pb.StepReport(rows=[pb.Row(request_id="a")]))
    kept.detached()
