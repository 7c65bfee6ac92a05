"""The bound on overtaking: what it promises, counted on whole simulations, and that it is needed."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.core.events import Event, StepDone, Submitted
from scheduler_service.core.overtaking import Overtaking
from scheduler_service.core.policies import make_policy
from scheduler_service.core.types import Request, RequestClass
from scheduler_service.sim.plain import Plain
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job
from tests.simulator.builders import SECOND, ends, job, run


class Watched(Plain):
    """Counts the rounds in which a request was passed by later arrivals of its class, and the work ahead of it."""

    def watch(self) -> "Watched":
        self.ahead: dict[str, int] = {}
        self.passed: Counter[str] = Counter()
        observe = self.core.observe

        def watched(event: Event, now: float) -> object:
            live = [entry.request for entry in self.core.fleet.entries.values()]
            effects = observe(event, now)
            match event:
                case Submitted(request):
                    self.ahead[request.id] = self.core.fleet.overtaking._ahead[request.klass]  # type: ignore[union-attr]
                case StepDone():
                    ran = {row.id for row in event.rounds if not row.skipped}
                    self._count([one for one in live if one.id in ran], [one for one in live if one.id not in ran])
            return effects

        self.core.observe = watched  # type: ignore[assignment, method-assign]
        return self

    def _count(self, ran: Sequence[Request], waited: Sequence[Request]) -> None:
        for one in waited:
            later = [other for other in ran if other.klass == one.klass and other.arrival > one.arrival]
            self.passed[one.id] += len(later)


@st.composite
def workloads(draw: st.DrawFn) -> list[Job]:
    return [
        job(
            f"j{index:02d}",
            draw(st.integers(0, 60)) / 2,
            draw(st.integers(1, 80)),
            klass=draw(st.sampled_from([RequestClass.DEFAULT, RequestClass.BATCH])),
            predicted_output_tokens=draw(st.none() | st.integers(1, 20)),
        )
        for index in range(draw(st.integers(2, 25)))
    ]


@settings(max_examples=100, deadline=None)
@given(workloads(), st.sampled_from(["gittins", "laps-sd"]), st.integers(2, 4), st.integers(1, 3), st.integers(0, 1))
def test_later_arrivals_never_get_more_than_the_bound_allows(
    jobs: list[Job], name: str, bound: int, slots: int, plan_lag: int
) -> None:
    policy = make_policy(name, [f"overtaking={bound}"])
    simulation = Watched(jobs, policy, SimFleet(slots, costs=SECOND, plan_lag=plan_lag)).watch()
    simulation.run()
    for id, passed in simulation.passed.items():
        assert passed <= (bound - 1) * simulation.ahead[id] + 2 * slots


def stream_of_short_ones() -> list[Job]:
    """One long request, and from then on a short one whenever the last has just ended."""
    shorts = [job(f"s{n:03d}", n * 5.0, 5, predicted_output_tokens=5) for n in range(400)]
    return [job("long", 0.0, 300, predicted_output_tokens=30), *shorts]


def test_without_a_bound_a_stream_of_short_requests_starves_a_long_one() -> None:
    jobs = stream_of_short_ones()
    ended = ends(run(jobs, "gittins:overtaking=0"))
    assert max(ended, key=lambda id: ended[id]) == "long"


def test_with_a_bound_the_long_one_gets_its_turn() -> None:
    jobs = stream_of_short_ones()
    assert ends(run(jobs, "gittins:overtaking=3"))["long"] < ends(run(jobs, "gittins:overtaking=0"))["long"] / 2


def request(id: str, klass: RequestClass = RequestClass.DEFAULT) -> Request:
    return Request(id, 0.0, 1, 100, klass)


def test_a_request_is_overdue_when_the_work_ahead_was_served_often_enough() -> None:
    account = Overtaking(bound=3)
    account.arrived(request("first"), 4)
    account.arrived(request("second"), 1)
    account.arrived(request("third"), 1)
    due_after: list[str] = []
    for _ in range(2 * (4 + 1)):
        due_after += account.overdue()
        account.served([(request("third"), 1, 1)])
    assert due_after == ["first"]  # after 2 * 4 rounds
    assert list(account.overdue()) == ["second"]  # after 2 * 5


def test_nobody_is_overtaken_in_a_round_in_which_it_runs() -> None:
    account = Overtaking(bound=2)
    account.arrived(request("alone"), 1)
    account.arrived(request("other"), 99)
    for _ in range(50):
        account.served([(request("alone"), 1, 1)])
    assert list(account.overdue()) == []
    account.served([(request("other"), 1, 1)])
    assert list(account.overdue()) == ["alone"]


def test_classes_have_accounts_of_their_own() -> None:
    account = Overtaking(bound=2)
    account.arrived(request("batch", RequestClass.BATCH), 1)
    account.arrived(request("default"), 5)
    account.arrived(request("other"), 1)
    for _ in range(4):
        account.served([(request("other"), 1, 1)])
    assert list(account.overdue()) == []


def test_what_ended_is_no_work_ahead() -> None:
    account = Overtaking(bound=2)
    account.arrived(request("gone"), 50)
    account.ended(request("gone"))
    assert account.arrived(request("next"), 3) == 3


def test_ended_requests_take_no_memory_and_are_never_sorted_out() -> None:
    """To sort them out would hold the event loop for milliseconds with ten thousand live."""
    overtaking = Overtaking(20)
    for number in range(1000):
        overtaking.arrived(request(f"r{number}"), 100)
    for number in range(500):
        overtaking.ended(request(f"r{number}"))
        assert sum(map(len, overtaking._due.values())) == 999 - number


def test_an_id_that_is_used_again_is_not_overdue_for_what_its_former_request_waited() -> None:
    overtaking = Overtaking(2)
    overtaking.arrived(request("a"), 10)
    overtaking.ended(request("a"))
    overtaking.arrived(request("other"), 100)
    overtaking.arrived(request("a"), 10)
    overtaking.served([(request("other"), 100, 20)])
    assert not list(overtaking.overdue())
