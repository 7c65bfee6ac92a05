"""What makes a run one that measured something else, from what came of it. No service runs."""

from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate, cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from laps_sd import serve
from laps_sd.client import Predictor, QueueFull, Stats, Worker
from laps_sd.compare import live
from laps_sd.compare.host import Conditions
from laps_sd.compare.live import Measured, as_json, faults, learned, warm_up
from laps_sd.compare.pace import latest_s, pace_of
from laps_sd.loadtest.plan import Planned
from laps_sd.loadtest.record import Record
from laps_sd.loadtest.target import Refused
from laps_sd.options import Options
from scheduler_service.predictor.online import OnlinePredictor
from scheduler_service.predictor.window import WINDOW
from scheduler_service.sim.recording import Recording, Seen, Shape


def measured(*, sent_s: float = 0.0, error: str = "", seen: int = 4, cold: bool = False) -> Measured:
    """Of one request of four tokens; the scheduler saw `seen` of them."""
    record = Record(0, 0.0, 0.0, sent_s=sent_s, end_s=1.0, output_tokens=4, request_id="r", error=error)
    recording = Recording(requests={"r": Seen(8, None, seen)})
    return Measured([record], Stats(workers=[Worker()]), Conditions(), recording, cold)


def test_an_undisturbed_run_has_no_fault() -> None:
    assert faults(measured()) == []


def test_each_fault_is_said() -> None:
    for run, words in (
        (measured(error="UNAVAILABLE: gone"), "1 requests failed: 1 UNAVAILABLE"),
        (measured(sent_s=0.5), "the driver fell behind its schedule, by 500 ms"),
        (measured(cold=True), "the predictor had forgotten"),
        (measured(seen=3), "a service died"),
    ):
        (fault,) = faults(run)
        assert words in fault


def test_a_worker_that_died_and_came_back_is_a_fault_while_requests_were_served() -> None:
    run = measured()
    run.recording.requests["r"].arrived_s, run.recording.requests["r"].ended_s = 10.0, 20.0
    run.recording.lost_s = [9.0, 21.0]
    assert faults(run) == []
    run.recording.lost_s.append(15.0)
    assert faults(run) == ["the worker was lost while requests were served"]


def test_a_worker_that_is_away_at_the_end_is_a_fault_and_idle_for_no_known_time() -> None:
    run = measured()
    run.stats = Stats()
    run.recording.kv_tokens, run.recording.timeline = 100, steps(0.015)
    figures = as_json(run, [Planned(0, 0.0, "p", 8, 4, False, category="chat")])
    assert figures["faults"] == ["the worker was away at the end"]
    assert figures["scheduler"]["idle_share"] == 0.0


PACE = pace_of("t_verify_ms=10,t_token_ms=1")
ALONE = Shape(drafts=4, batch=1, verified=5, prefilled=0, resumed=0)  # 15 ms at this pace


def steps(*took_s: float, begin_s: float = 1.0, delays_s: Sequence[float] = (0.0,)) -> list[tuple[Shape, float, float]]:
    """One after the other, reported with these delays in turn."""
    ends = accumulate(took_s, initial=begin_s)
    next(ends)
    return [(ALONE, end + delay, took) for end, took, delay in zip(ends, took_s, cycle(delays_s), strict=False)]


def test_a_machine_too_slow_for_its_pace_is_a_fault() -> None:
    run = measured()
    run.recording.timeline = steps(0.615, 0.615)
    assert faults(run, PACE) == ["the machine could not keep the pace: a step was 1.2 s late"]


def test_what_was_late_may_be_made_up_for() -> None:
    run = measured()
    run.recording.timeline = steps(0.615, *[0.005] * 30, 0.615)
    assert faults(run, PACE) == []


def test_after_a_wait_nothing_is_late_any_more() -> None:
    """The device of the pace, which was ahead, had run dry before."""
    run = measured()
    run.recording.timeline = [*steps(0.315), *steps(0.315, begin_s=1.4)]
    assert latest_s(PACE, run.recording) == pytest.approx(0.3)


def test_reports_that_come_late_by_turns_hide_no_lateness() -> None:
    run = measured()
    run.recording.timeline = steps(*[0.0155] * 2000, delays_s=(0.0, 0.006))
    assert latest_s(PACE, run.recording) == pytest.approx(1.0)


def test_the_warm_up_may_be_late() -> None:
    run = measured()
    run.recording.timeline = steps(2.0)
    run.recording.requests["r"].arrived_s = 3.5
    assert faults(run, PACE) == []


def test_the_warm_up_is_short_and_of_the_lesson() -> None:
    lesson = [Planned(i, None, f"p{i}", 0, 256, False, stop=("\n\n",)) for i in range(9)]
    short = warm_up(lesson, slots=2)
    assert [planned.prompt for planned in short] == ["p0", "p1", "p2", "p3"]
    assert all(planned.max_tokens <= 8 and not planned.stop and planned.due_s == 0.0 for planned in short)


class Service:
    """Of whose predictor each answer tells more."""

    def __init__(self) -> None:
        self.finished, self.fitted = 100, [0, 32, 90]

    async def stats(self) -> Stats:
        return Stats(predictor=Predictor(finished=self.finished, trained_on=self.fitted.pop(0)))


async def test_what_was_taught_is_fitted_before_the_service_ends() -> None:
    service = Service()
    assert await learned(service)  # type: ignore[arg-type]
    assert not service.fitted


async def test_however_many_are_taught_are_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the predictor's own rule of when it is fitted."""
    monkeypatch.setattr(live, "LEARNING_S", 0.0)
    service, predictor, trained_on = Service(), OnlinePredictor(), 0
    for finished in range(1, 2 * WINDOW + 100):
        predictor.observe({}, 5, 0, 0)
        if predictor.due:
            trained_on = len(predictor.begin_refit().examples)
        service.finished, service.fitted = finished, [trained_on]
        assert finished < 40 or await learned(service), finished  # type: ignore[arg-type]


async def test_what_is_not_fitted_in_time_is_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LEARNING_S", 0.0)
    assert not await learned(Service())  # type: ignore[arg-type]


def test_a_lesson_that_was_not_learned_is_no_lesson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_measure", lambda *given: measured())
    with pytest.raises(live.Untaught, match="did not learn from 1 answers within 120 s"):
        live.teach(Options(), [Planned(0, None, "p", 8, 4, False)], tmp_path / "taught", tmp_path / "log")


@pytest.mark.parametrize("failure", [Refused("UNAVAILABLE: gone"), QueueFull("4 wait")])
def test_a_service_that_fails_around_a_run_is_a_sentence(
    failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(options: Options, use: Callable[..., Awaitable[None]], emit: object) -> None:
        await use(SimpleNamespace(ready=fails))

    async def fails() -> None:
        raise failure

    monkeypatch.setattr(serve, "run", run)
    (tmp_path / "taught").mkdir()
    with pytest.raises(typer.Exit):
        live.measure(Options(), [], [], tmp_path / "taught", tmp_path / "log")
    assert capsys.readouterr().err == f"laps-sd: {failure}; {tmp_path / 'log'} has more\n"
