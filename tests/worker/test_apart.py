"""A worker's engine whose drafts come from another process: whatever that does, the text is that of no drafter.

Each test first settles: it waits for each chain, so that its drafts are the remote drafter's. Then it disturbs.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random

import pytest

from laps_sd.ports import claim_ports
from tests.chaos.proxy import Trouble
from tests.waiting import WAIT_S
from tests.worker.apart import DISORDERS, LIES, Script, serving
from tests.worker.attached import process
from tests.worker.harness import Driver, Tiny
from tests.worker.network import Network
from tests.worker.test_exactness import TEXTS
from worker_service import draft_post
from worker_service.draft_post import LinkPost
from worker_service.engine.drafting.drafter import Ask, Drafter, FirstOf, NoDrafter
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.drafting.remote_drafter import RemoteDrafter
from worker_service.engine.drafting.shielded import Shielded
from worker_service.engine.types import Limits, Run, Sampling

GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=3)
TOKENS = 60
LEAST_SHARE = 0.3
REQUESTS = 6
DISTURBED = 4  # rounds of which the drafter hears while it lies; further ones go on as fast as they like


@pytest.fixture(scope="module", params=[GREEDY, SAMPLED], ids=["greedy", "sampled"])
def undisturbed(request: pytest.FixtureRequest, tiny: Tiny) -> tuple[Sampling, list[list[int]]]:
    """The texts without a drafter, prompts included."""
    driver = Driver(tiny.engine(drafter=NoDrafter()))
    admit_all(driver, tiny, request.param)
    driver.finish_all()
    return request.param, [tiny.prompt(text) + driver.outputs[str(i)] for i, text in enumerate(TEXTS[:REQUESTS])]


def admit_all(driver: Driver, tiny: Tiny, sampling: Sampling) -> None:
    for i, text in enumerate(TEXTS[:REQUESTS]):
        driver.admit(str(i), tiny.prompt(text), Limits(max_tokens=TOKENS, ignore_eos=True), sampling)


@dataclass
class Apart:
    """An engine, its link, and how many of its drafts the remote drafter made."""

    tiny: Tiny
    sampling: Sampling
    address: str
    lookup: Drafter = field(default_factory=NgramDrafter)

    def __post_init__(self) -> None:
        self.post = LinkPost(
            {"drafters": self.address.split(","), "names": [], "tls": {}, "worker_id": "test", "vocabulary": "test"}
        )
        self.remote = RemoteDrafter(self.post, b"key")
        self.driver = Driver(self.tiny.engine(drafter=FirstOf(Shielded(self.remote), self.lookup)))
        admit_all(self.driver, self.tiny, self.sampling)

    def step(self) -> None:
        self.driver.step(Run(name, 4, 64) for name in self.driver.live)

    def until(self, settled: bool = True) -> None:
        """Until the drafter is there and has answered all that it was told, or until it has gone."""
        self.talk(lambda: self.settled is settled)

    def talk(self, done: Callable[[], bool]) -> None:
        """Read and tell until it is done."""
        deadline = self.post.now() + WAIT_S
        while not done():
            assert self.post.now() < deadline
            self.remote._read(0.05)
            self.remote._tell()

    @property
    def settled(self) -> bool:
        requests = self.remote._requests.values()
        return self.remote._welcome is not None and all(one.handle and one.told_s is None for one in requests)

    @property
    def tired(self) -> bool:
        """No request is offered any more: the drafter has lost all of them too often."""
        return all(one.resting for one in self.remote._requests.values())

    def share(self, rounds: int = 6) -> float:
        """Of what was verified in so many undisturbed rounds, the remote drafter's part. Fails if it is small."""
        for _ in range(rounds):
            self.until()
            self.step()
        drafted = sum(row.drafted for row in self.driver.rows)
        share = self.remote.drafted / drafted
        sys.stdout.write(f"{self.remote.drafted} of {drafted} drafts from the remote drafter ({share:.0%})\n")
        assert share >= LEAST_SHARE
        return share

    def serves_again(self) -> None:
        """Once all is settled, drafts of the remote drafter are verified."""
        self.until()
        before = self.remote.drafted
        self.step()
        assert self.remote.drafted > before

    def finish(self) -> list[list[int]]:
        while self.driver.live:
            self.step()
        return [self.tiny.prompt(text) + self.driver.outputs[str(i)] for i, text in enumerate(TEXTS[:REQUESTS])]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, tiny: Tiny, sampling: Sampling, script: Script) -> Apart:
    apart = Apart(tiny, sampling, stack.enter_context(serving(script)))
    stack.callback(apart.post.close)
    return apart


def way(stack: ExitStack, script: Script) -> Network:
    """To a drafter that follows the script."""
    network = Network(stack.enter_context(serving(script)))
    stack.callback(network.close)
    return network


Texts = tuple[Sampling, list[list[int]]]


def flooded(apart: Apart, mode: str) -> bool:
    """Whether its link does not dial it any more for a while."""
    return mode == "flood" and apart.post._socket is None


@pytest.mark.parametrize("mode", ["honest", *LIES, *DISORDERS])
def test_no_lie_and_no_disorder_changes_a_token(tiny: Tiny, undisturbed: Texts, stack: ExitStack, mode: str) -> None:
    sampling, texts = undisturbed
    script = Script(texts)
    apart = start(stack, tiny, sampling, script)
    apart.share()
    script.mode = mode
    for _ in range(DISTURBED):
        before = script.messages
        apart.step()
        apart.talk(lambda: script.messages > before or apart.tired or flooded(apart, mode))  # noqa: B023  # asked now
    assert apart.finish() == texts


def test_what_never_came_is_not_waited_for(tiny: Tiny, undisturbed: Texts, stack: ExitStack) -> None:
    sampling, texts = undisturbed
    apart = Apart(tiny, sampling, "127.0.0.1:1")
    stack.callback(apart.post.close)
    assert apart.finish() == texts
    assert apart.remote.drafted == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_it_may_be_killed_stopped_and_started_again_empty_at_any_round(
    tiny: Tiny, undisturbed: Texts, stack: ExitStack, seed: int
) -> None:
    sampling, texts = undisturbed
    random, settings = Random(seed), {"port": claim_ports(0)[0]}
    lives = stack.enter_context(ExitStack())
    address, drafter = lives.enter_context(process("tests.worker.apart", settings, texts))
    apart = Apart(tiny, sampling, address)
    stack.callback(apart.post.close)
    apart.share(rounds=4)
    for what in random.sample(["kill", "stop"], 2):
        drafter.send_signal(signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        for _ in range(random.randrange(1, 4)):
            apart.step()
        if what == "kill":
            apart.until(settled=False)
            lives.pop_all().close()
            _, drafter = lives.enter_context(process("tests.worker.apart", settings, texts))
        else:
            drafter.send_signal(signal.SIGCONT)
        apart.serves_again()
    assert apart.finish() == texts


TROUBLES = {
    "delayed": Trouble(delay_s=0.02),
    "throttled": Trouble(bytes_per_s=20_000),
    "held up": Trouble(holds=frozenset({"up"})),
    "held down": Trouble(holds=frozenset({"down"})),
    "held": Trouble(holds=frozenset({"up", "down"})),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_no_trouble_on_the_way_changes_a_token(tiny: Tiny, undisturbed: Texts, stack: ExitStack, trouble: str) -> None:
    sampling, texts = undisturbed
    network = way(stack, Script(texts))
    apart = Apart(tiny, sampling, network.address)
    stack.callback(apart.post.close)
    apart.share()
    with network.troubled(TROUBLES[trouble]):
        for _ in range(DISTURBED):
            apart.step()
        if not TROUBLES[trouble].holds:
            apart.serves_again()  # slowly
    apart.serves_again()
    assert apart.finish() == texts


def test_a_way_that_is_cut_is_dialled_again(tiny: Tiny, undisturbed: Texts, stack: ExitStack) -> None:
    sampling, texts = undisturbed
    network = way(stack, Script(texts))
    apart = Apart(tiny, sampling, network.address)
    stack.callback(apart.post.close)
    apart.share(rounds=4)
    for _ in range(2):
        session = apart.post._session
        network.cut()
        apart.step()
        apart.talk(lambda: apart.post._session > session)  # noqa: B023  # asked now
        apart.serves_again()
    assert apart.finish() == texts


def test_one_that_comes_back_empty_is_told_all_again(tiny: Tiny, undisturbed: Texts, stack: ExitStack) -> None:
    sampling, texts = undisturbed
    first, second = Script(texts), Script(texts)
    with serving(first) as address:
        apart = Apart(tiny, sampling, address)
        stack.callback(apart.post.close)
        apart.share()
    apart.until(settled=False)
    for _ in range(3):
        apart.step()
    stack.enter_context(serving(second, int(address.split(":")[1])))
    apart.serves_again()
    assert {row.start for row in second.truths[:REQUESTS]} == {0}
    assert apart.finish() == texts


def test_the_second_of_two_serves_where_the_first_is_away(tiny: Tiny, undisturbed: Texts, stack: ExitStack) -> None:
    sampling, texts = undisturbed
    there = stack.enter_context(serving(Script(texts)))
    apart = Apart(tiny, sampling, f"127.0.0.1:1,{there}")
    stack.callback(apart.post.close)
    apart.share()
    assert apart.finish() == texts


def test_the_links_process_may_die(
    tiny: Tiny, undisturbed: Texts, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_post, "RESTART_S", 0.0)
    sampling, texts = undisturbed
    apart = start(stack, tiny, sampling, Script(texts))
    apart.share()
    process = apart.post._process
    assert process is not None
    process.kill()
    process.wait()
    apart.until(settled=False)
    apart.step()
    apart.until()  # another one is started
    assert apart.post._process is not process
    assert apart.finish() == texts


def test_the_links_process_ends_with_its_worker(tiny: Tiny, undisturbed: Texts, stack: ExitStack) -> None:
    apart = start(stack, tiny, undisturbed[0], Script(undisturbed[1]))
    apart.until()
    process = apart.post._process
    assert process is not None
    assert process.poll() is None
    apart.post.close()
    assert process.wait(WAIT_S) == 0


def test_requests_that_go_and_come_leave_nothing_at_the_drafter(
    tiny: Tiny, undisturbed: Texts, stack: ExitStack
) -> None:
    sampling, texts = undisturbed
    script = Script(texts)
    apart = start(stack, tiny, sampling, script)
    apart.share()
    for name in apart.driver.live[::2]:
        apart.driver.engine.drop(name)  # its drafts are in flight
    for name in apart.driver.live[:2]:
        apart.driver.readmit(name, len(apart.driver.outputs[name]) // 2, placement=2)
    assert apart.finish() == texts
    apart.driver.forget_all()
    apart.driver.admit("last", [5, 6], Limits(max_tokens=2, ignore_eos=True), sampling)
    apart.driver.finish_all()
    opened = {row.handle for row in script.truths if not row.start}
    with script.spoken:
        assert script.spoken.wait_for(lambda: opened <= {row.handle for row in script.truths if row.forget}, WAIT_S)


def test_a_request_that_must_stay_here_is_never_told(tiny: Tiny, undisturbed: Texts, stack: ExitStack) -> None:
    sampling, texts = undisturbed
    script = Script(texts)
    apart = start(stack, tiny, sampling, script)
    apart.until()
    secret = [9, 9, 9, 9]
    apart.remote.expect(Ask("secret", secret, 0, local=True))
    assert apart.finish() == texts
    assert all(9 not in row.tokens or list(row.tokens) != secret for row in script.truths)
