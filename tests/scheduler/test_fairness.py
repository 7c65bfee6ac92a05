"""Tenants: shares by weight, nothing saved up, bounds on what waits; and with one tenant no difference at all."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from unittest import mock

import pytest

from scheduler_service.core import fair_ranking, fairness, front
from scheduler_service.core.classes import LEAST, ClassAccount
from scheduler_service.core.events import Cancelled, Submitted
from scheduler_service.core.fair_ranking import FairRanking
from scheduler_service.core.fairness import GRAIN_S, Flow, Tenants
from scheduler_service.core.ranking import Changes, Key
from scheduler_service.core.terms import Terms
from scheduler_service.core.types import QueueIsFull, RequestClass, TooLarge
from scheduler_service.sim.costs import StepCosts
from scheduler_service.store import MemoryStore
from scheduler_service.tenants import read_terms
from tests.scheduler.builders import FakeWorker, core, request
from tests.scheduler.live import ScriptedGateway, ScriptedWorker, scheduler
from tests.simulator.builders import NAMES, ends, job, run

SLOTS = 4
LONG = 10_000


class SimFleet(FakeWorker):
    """One worker whose round lasts a second; requests are named TENANT-NUMBER."""

    def __init__(self, policy: str = "gittins", terms: dict[str, Terms] | None = None, slots: int = SLOTS) -> None:
        super().__init__(core(policy), {}, slots=slots)
        self.core.fleet.tenants.terms = terms or {}

    def flood(self, tenant: str, count: int = 20, length: int = LONG, **more: object) -> None:
        for number in range(count):
            id = f"{tenant}-{number}"
            self.lengths[id] = length
            self.submit(id, tenant=tenant, max_tokens=LONG, **more)

    def shares(self, rounds: int) -> Counter[str]:
        """Request-rounds by tenant in the next `rounds`."""
        for _ in range(rounds):
            self.step()
        return Counter(id.split("-")[0] for ids in self.ran[-rounds:] for id in ids)


@pytest.mark.parametrize("policy", ["las", "laps-sd", "gittins"])
@pytest.mark.parametrize(("heavy", "light"), [(1, 1), (3, 1), (1.5, 1)])
def test_service_is_shared_by_weight(policy: str, heavy: float, light: float) -> None:
    fleet = SimFleet(policy, {"a": Terms(heavy), "b": Terms(light)})
    fleet.flood("a")
    fleet.flood("b")
    shares = fleet.shares(240)
    assert shares["a"] / heavy == pytest.approx(shares["b"] / light, abs=2 * SLOTS * (GRAIN_S + 1) / light)


def test_turns_are_no_shorter_with_more_workers() -> None:
    def preemptions(workers: int) -> float:
        jobs = [job(f"{tenant}{number}", 0.0, 200, tenant=tenant) for number in range(6 * workers) for tenant in "ab"]
        trace = run(jobs, "gittins", slots=2, workers=workers, costs=StepCosts())
        return sum(outcome.record.preemptions for outcome in trace.outcomes) / len(jobs)

    assert preemptions(8) < 1.1 * preemptions(1)


def test_without_preemption_requests_take_turns_when_others_end() -> None:
    fleet = SimFleet("fcfs")
    fleet.flood("a", count=200, length=5)
    fleet.flood("b", count=200, length=5)
    shares = fleet.shares(120)
    assert abs(shares["a"] - shares["b"]) <= 3 * 5 * SLOTS


def test_one_who_floods_does_not_keep_another_waiting() -> None:
    fleet = SimFleet()
    fleet.flood("a", count=100)
    fleet.shares(50)
    fleet.flood("b", count=1, length=5)
    ran = fleet.shares(8)
    assert ran["b"] == 5
    assert ran["a"] == 8 * SLOTS - 5  # nobody is kept from a slot that the other cannot use


def test_who_was_away_has_saved_up_nothing() -> None:
    fleet = SimFleet()
    fleet.flood("a")
    fleet.shares(100)
    fleet.flood("b")
    shares = fleet.shares(100)
    assert abs(shares["a"] - shares["b"]) <= 2 * SLOTS


def test_who_was_alone_owes_nothing() -> None:
    fleet = SimFleet()
    fleet.flood("a")
    fleet.shares(100)
    for number in range(20):
        fleet.core.observe(Cancelled(f"a-{number}"), fleet.now)
    fleet.flood("b")
    fleet.flood("c")
    assert set(fleet.shares(40)) == {"b", "c"}
    for number in range(20, 40):
        fleet.lengths[f"a-{number}"] = LONG
        fleet.submit(f"a-{number}", tenant="a", max_tokens=LONG)
    shares = fleet.shares(120)
    assert max(shares.values()) - min(shares.values()) <= 3 * SLOTS


def test_going_away_and_coming_back_settles_no_account() -> None:
    tenants = Tenants()
    one, other = request("1", tenant="a"), request("2", tenant="b")
    _, ahead = tenants.join(one)
    tenants.join(other)
    ahead.charge(100)
    tenants.leave(one)
    assert tenants.join(one)[1].virtual_s == 100


def test_who_waits_in_a_worse_class_holds_nothing_back_in_a_better_one() -> None:
    """In the worse class there is hardly any service to share: whoever came next would otherwise start where it
    stands there, long before all that were served in the better class."""
    fleet = SimFleet()
    fleet.flood("a", klass=RequestClass.INTERACTIVE)
    fleet.flood("b", klass=RequestClass.BATCH)
    fleet.shares(200)
    fleet.flood("c", klass=RequestClass.INTERACTIVE)
    shares = fleet.shares(100)
    assert abs(shares["a"] - shares["c"]) <= 3 * SLOTS


def test_who_is_not_ahead_is_forgotten() -> None:
    tenants = Tenants()
    for number in range(1000):
        one = request("1", tenant=f"t{number}")
        tenants.join(one)[1].charge(1)
        tenants.leave(one)
    assert len(tenants._tenants) == 0
    assert len(tenants._flows[one.klass]._flows) <= 100


def test_the_class_goes_before_the_share() -> None:
    fleet = SimFleet()
    fleet.flood("a", klass=RequestClass.INTERACTIVE)
    fleet.flood("b")
    assert set(fleet.shares(2)) == {"a"}
    shares = fleet.shares(100)
    assert shares["a"] > 3 * shares["b"]


def test_each_class_gets_its_least_share_of_a_flood_of_better_ones() -> None:
    fleet = SimFleet()
    for klass in RequestClass:
        fleet.flood(klass.name, count=2 * SLOTS, klass=klass)
    shares = fleet.shares(400)
    assert shares["DEFAULT"] / shares.total() == pytest.approx(LEAST[RequestClass.DEFAULT], abs=0.02)
    assert shares["BATCH"] / shares.total() == pytest.approx(LEAST[RequestClass.BATCH], abs=0.02)


def test_a_class_is_owed_nothing_for_the_time_in_which_it_had_nothing_to_run() -> None:
    fleet = SimFleet()
    fleet.flood("a", klass=RequestClass.INTERACTIVE)
    fleet.shares(100)
    fleet.flood("b", klass=RequestClass.BATCH)
    assert set(fleet.shares(5)) == {"a"}


def test_a_class_is_owed_nothing_for_the_time_in_which_none_of_its_requests_waited() -> None:
    """One request runs all the time, and gets less than the share of its class."""
    fleet = SimFleet(slots=32)
    fleet.flood("a", count=64, klass=RequestClass.INTERACTIVE)
    fleet.flood("b", count=1)
    assert fleet.shares(400)["b"] > 380
    fleet.flood("c", count=64)
    shares = fleet.shares(100)
    assert (shares["b"] + shares["c"]) / shares.total() == pytest.approx(LEAST[RequestClass.DEFAULT], abs=0.03)


def test_what_better_classes_leave_free_counts_as_service() -> None:
    fleet = SimFleet()
    fleet.flood("a", count=SLOTS - 1, klass=RequestClass.INTERACTIVE)
    fleet.flood("b", klass=RequestClass.BATCH)
    assert fleet.shares(100)["a"] == 100 * (SLOTS - 1)


def test_a_tenant_is_not_served_in_a_better_class_than_its_terms_allow() -> None:
    fleet = SimFleet(terms={"a": Terms(best_class=RequestClass.DEFAULT)})
    fleet.flood("a", klass=RequestClass.INTERACTIVE)
    fleet.flood("b")
    shares = fleet.shares(100)
    assert abs(shares["a"] - shares["b"]) <= 2 * SLOTS
    fleet.flood("c", klass=RequestClass.INTERACTIVE)
    shares = fleet.shares(50)
    assert shares["c"] > 3 * (shares["a"] + shares["b"])


@pytest.mark.parametrize("policy", NAMES)
def test_with_one_tenant_nothing_changes(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job(f"j{number:02d}", number / 2, 1 + number * 7 % 23, tenant="one") for number in range(40)]
    turning = ends(run(jobs, policy, slots=2))
    monkeypatch.setattr(fairness, "GRAIN_S", 1e9)
    assert ends(run(jobs, policy, slots=2)) == turning


def operations(random: Random) -> Iterator[tuple[str, str, int]]:
    """More requests come than go, and most changes are asked about before the next one."""
    for _ in range(300):
        what = random.choice(["add", "add", "remove", "move", "charge", "charge", "owe"])
        yield what, random.choice("abcdefgh"), random.randrange(40)
        if random.random() < 0.7:
            yield "ask", "a", random.randrange(9)


def places(keys: Iterable[Key]) -> list[Key]:
    """Flows whose virtual time is in the same grain may stand in any order."""
    return [(*key[:2], key[2].grain, key[3]) for key in keys]


@pytest.mark.parametrize("few_groups", [0, 4, 99])
@pytest.mark.parametrize("few", [0, 6, 99])
@pytest.mark.parametrize("seed", range(3))
def test_a_ranking_is_in_order_however_virtual_times_move(few: int, few_groups: int, seed: int) -> None:
    """Asked for fewer keys than there are tenants, or for few of many, it does not look at all of them; nobody can
    tell."""
    with (
        mock.patch.multiple(fair_ranking, FEW=few, FEW_GROUPS=few_groups),
        mock.patch.multiple(front, FEW=few, LEAST_FRONT=1),
    ):
        in_order_after(operations(Random(seed)))


def in_order_after(operations: Iterable[tuple[str, str, int]]) -> None:
    changes = Changes()
    flows = {name: Flow(name, changes) for name in "abcdefgh"}
    accounts = [ClassAccount(klass, changes) for klass in RequestClass]
    for account in accounts:
        account.live = 1
    ranking, kept = FairRanking(changes), []
    for what, name, number in operations:
        key = (number % 5 == 0, accounts[number % 3], flows[name], number, f"{name}{number}")
        if what == "charge":
            flows[name].charge(number / 10)
        elif what == "owe":
            accounts[number % 3].serve(number / 10 - 2)
        elif what == "ask":
            assert places(ranking.first(number)) == places(sorted(kept))[:number]
            assert places(ranking.beyond(number)) == places(sorted(kept))[number:]
            assert places(filter(None, [ranking.at(number)])) == places(sorted(kept))[number : number + 1]
        elif what == "move" and kept:
            old = kept.pop(number % len(kept))
            kept.append((not old[0], *old[1:3], number, *old[4:]))
            ranking.move(old, kept[-1])
        elif what == "add" and key[-1] not in [one[-1] for one in kept]:
            ranking.add(key)
            kept.append(key)
        elif what == "remove" and kept:
            ranking.remove(kept.pop(number % len(kept)))

    assert places(ranking) == places(sorted(kept))
    assert places(reversed(ranking)) == places(sorted(kept, reverse=True))
    assert len(ranking) == len(kept)
    assert len(ranking.first(5)) == min(5, len(kept))
    assert all(ranking.before(key) == sum(other < key for other in kept) for key in kept)


# ---- bounds ----


def test_a_tenants_requests_are_bounded_and_nobody_elses_with_them() -> None:
    fleet = SimFleet(terms={"a": Terms(max_requests=2)})
    fleet.flood("a", count=2, length=3)
    with pytest.raises(QueueIsFull, match="2 requests of this tenant"):
        fleet.submit("a-more", tenant="a")
    fleet.flood("b", count=5)
    fleet.shares(12)  # both of its requests end
    fleet.submit("a-again", tenant="a")
    assert "a-again" in fleet.core.fleet.entries


def test_a_tenants_tokens_are_bounded() -> None:
    fleet = SimFleet(terms={"*": Terms(max_tokens=100)})
    fleet.core.observe(Submitted(request("1", prompt=10, max_tokens=50, tenant="a")), 0.0)
    with pytest.raises(QueueIsFull, match="may need 60 tokens, with this one 41 more; at most 100"):
        fleet.core.observe(Submitted(request("2", prompt=1, max_tokens=40, tenant="a")), 0.0)
    fleet.core.observe(Submitted(request("3", prompt=1, max_tokens=39, tenant="a")), 0.0)
    with pytest.raises(TooLarge, match="101 tokens, of at most 100 of this tenant"):
        fleet.core.observe(Submitted(request("4", prompt=1, max_tokens=100, tenant="b")), 0.0)


async def test_a_refusal_says_when_to_come_back_and_new_terms_need_no_restart(tmp_path: Path) -> None:
    file = tmp_path / "tenants"
    file.write_text("acme requests=1\n")
    async with scheduler(MemoryStore(), tenants=file) as (_, target):
        worker = await ScriptedWorker(target).attach()
        gateway = ScriptedGateway(target)
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("one", tenant="acme")
        await gateway.submit("two", tenant="acme")
        await gateway.submit("three", tenant="other")
        await gateway.until(lambda: "two" in gateway.refused and {"one", "three"} <= gateway.accepted)
        assert gateway.refused["two"].code == 8  # RESOURCE_EXHAUSTED
        assert gateway.refused["two"].retry_after_s > 0
        file.write_text("acme requests=20\n")
        await gateway.submit("again", tenant="acme")
        await gateway.until(lambda: "again" in gateway.accepted)
        await gateway.close()
        await worker.close()


async def test_a_worker_is_told_whose_drafts_must_stay_there(tmp_path: Path) -> None:
    file = tmp_path / "tenants"
    file.write_text("secret drafts=local\n")
    async with scheduler(MemoryStore(), tenants=file) as (_, target):
        worker = await ScriptedWorker(target, slots=2).attach()
        gateway = ScriptedGateway(target)
        await gateway.until(lambda: gateway.serving.ready)
        for tenant in ("secret", "open"):
            await gateway.submit(tenant, tenant=tenant)
        while len(worker.admitted) < 2:
            await worker.next_command()
        assert {id: admit.local_drafts for id, admit in worker.admitted.items()} == {"secret": True, "open": False}
        file.write_text("")
        await gateway.submit("later", tenant="secret")
        while "later" not in worker.admitted:
            await worker.next_command()
        assert not worker.admitted["later"].local_drafts
        await gateway.close()
        await worker.close()


def test_terms_are_read_by_line(tmp_path: Path) -> None:
    file = tmp_path / "tenants"
    acme, others = "acme weight=2 tokens=5e5 class=default # since May", "* requests=100 drafts=local"
    file.write_text(f"# our tenants\n{acme}\n\n{others}\nopen drafts=anywhere\n")
    assert read_terms(file) == {
        "acme": Terms(2, max_tokens=500_000, best_class=RequestClass.DEFAULT),
        "*": Terms(max_requests=100, local_drafts=True),
        "open": Terms(),
    }


def test_any_character_may_be_in_a_comment(tmp_path: Path) -> None:
    """Also those at which Python's splitlines ends a line."""
    file = tmp_path / "tenants"
    file.write_bytes("a weight=2 # a\x85b\u2028c\x0cd\r\n* requests=1\r\n".encode())
    assert read_terms(file) == {"a": Terms(2), "*": Terms(max_requests=1)}


def test_a_file_of_other_bytes_than_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tenants"
    file.write_bytes(b"a weight=2 # \xff\n")
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))}: is not UTF-8"):
        read_terms(file)


@pytest.mark.parametrize(
    "line",
    [
        "a weight=0",
        "a weight=1e-320",
        "a weight=2e6",
        "a weight=nan",
        "a weight",
        "a speed=1",
        "a tokens=many",
        "a requests=inf",
        "a class=best",
        "a drafts=no",
        "b\nb",
    ],
)
def test_a_line_that_is_none_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "tenants").write_text(f"# tenants\n{line}\n")
    with pytest.raises(ValueError, match=r"line [23]: "):
        read_terms(tmp_path / "tenants")
