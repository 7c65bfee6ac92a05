"""The link to a drafter, and its settings: whose certificates count, and what a wrong setting is told."""

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from socket import AF_UNIX, SOCK_SEQPACKET, socket, socketpair

import pytest
from pydantic import ValidationError

from laps_sd.authority import make_certs
from protos.link.v1 import draft_link_pb2 as pb
from protos.tls import Tls
from tests.waiting import WAIT_S
from tests.worker.apart import Script, serving
from worker_service import draft_post
from worker_service.config import Settings
from worker_service.draft_link import DOWN
from worker_service.draft_post import LinkPost
from worker_service.drafting.session import LONGEST_CHAIN, WIDEST_FAN
from worker_service.engine.drafting.post import Drafts, Gone, Truth, Welcome
from worker_service.engine.drafting.remote import MOST_CHAINS


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    make_certs(tmp_path)
    return tmp_path


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def of(certs: Path, role: str) -> Tls:
    return Tls(ca=certs / role / "ca.crt", cert=certs / role / "tls.crt", key=certs / role / "tls.key")


def post(stack: ExitStack, addresses: list[str], names: list[str], tls: Tls) -> LinkPost:
    made = LinkPost(
        {
            "drafters": addresses,
            "names": names,
            "tls": tls.model_dump(mode="json"),
            "worker_id": "test",
            "vocabulary": "",
        }
    )
    stack.callback(made.close)
    return made


def welcomed(post: LinkPost) -> bool:
    """Waits until somebody welcomes it."""
    deadline = post.now() + WAIT_S
    while post.now() < deadline:
        if any(isinstance(news, Welcome) for news in post.receive(0.1)):
            return True
    return False


# Of two servers at one authority, the first with another role's certificate: nobody but the second may read texts.
@pytest.mark.parametrize(("names", "reached"), [(["scheduler"], 1), (["gone", "scheduler"], 1), ([], 0)])
def test_only_a_certificate_of_the_named_role_is_a_drafters(
    certs: Path, stack: ExitStack, names: list[str], reached: int
) -> None:
    scripts, addresses = [Script(), Script()], []
    for script, role in zip(scripts, ("gateway", "scheduler"), strict=True):
        credentials = of(certs, role).server_credentials()
        addresses.append(stack.enter_context(serving(script, credentials=credentials)))
    assert welcomed(post(stack, addresses, names, of(certs, "worker")))
    assert [bool(script.hellos) for script in scripts] == [number == reached for number in range(2)]


def test_without_a_certificate_nobody_is_told_anything(certs: Path, stack: ExitStack) -> None:
    script, open_to_all = Script(), Script()
    closed = stack.enter_context(serving(script, credentials=of(certs, "scheduler").server_credentials()))
    there = stack.enter_context(serving(open_to_all))
    assert welcomed(post(stack, [closed, there], ["scheduler"], Tls()))
    assert not script.hellos


def test_what_ends_a_worker_in_order_leaves_its_link_up(stack: ExitStack) -> None:
    """Such as a terminal that closes, which signals both."""
    link = post(stack, [stack.enter_context(serving(Script()))], [], Tls())
    assert welcomed(link)
    assert link._process is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        link._process.send_signal(number)
    link.close()
    assert link._process.returncode >= 0  # no signal has ended it


@pytest.mark.parametrize("drafter", ["remote:", "remote:nowhere", "remote:a:1,b"])
def test_a_drafter_elsewhere_that_is_no_address_is_refused_in_a_sentence(drafter: str) -> None:
    with pytest.raises(ValidationError, match="is not HOST:PORT"):
        Settings(model="m", drafter=drafter)
    assert Settings(model="m", drafter="remote:a:1,b:2").drafter_names == ["drafter"]


def no_sockets(monkeypatch: pytest.MonkeyPatch, reason: int) -> None:
    def fails(*_: object) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr("socket.socketpair", fails)


def test_a_drafter_elsewhere_is_refused_where_the_system_has_no_sockets_of_packets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As macOS."""
    no_sockets(monkeypatch, errno.EPROTONOSUPPORT)
    with pytest.raises(ValidationError, match="drafter in another process needs sockets of packets"):
        Settings(model="m", drafter="remote:a:1")
    assert Settings(model="m", drafter="ngram").drafter == "ngram"


def test_without_descriptors_there_are_no_drafts_for_a_while(monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    link = post(stack, [stack.enter_context(serving(Script()))], [], Tls())
    monkeypatch.setattr(draft_post, "RESTART_S", 0.0)
    with monkeypatch.context() as full:
        no_sockets(full, errno.EMFILE)
        assert link.receive(0.0) == []
    assert welcomed(link)


def test_an_honest_drafter_that_makes_all_the_guesses_it_may_is_heard() -> None:
    at_once = (LONGEST_CHAIN + 1) * (WIDEST_FAN - 1) + 2
    assert at_once <= MOST_CHAINS
    assert at_once <= draft_post._PER_ROW


def test_times_that_are_none_count_for_nothing(stack: ExitStack) -> None:
    for said, read in ((float("nan"), 0.0), (-1.0, 0.0), (float("inf"), 0.0), (1e300, 0.0), (0.25, 0.25)):
        address = stack.enter_context(serving(Script(step_s=said)))
        link = post(stack, [address], [], Tls())
        deadline = link.now() + WAIT_S
        news: list[Welcome] = []
        while not news and link.now() < deadline:
            news = [one for one in link.receive(0.1) if isinstance(one, Welcome)]
        assert [one.step_s for one in news] == [read]


def many(chains: int) -> bytes:
    drafts = pb.Drafts(chains=[pb.Chain(handle=1, at=1, prefix=1, tokens=[1])] * chains)
    return DOWN.pack(1, 0.0) + pb.FromDrafter(drafts=drafts).SerializeToString()


@pytest.fixture
def ends(stack: ExitStack) -> tuple[LinkPost, socket]:
    """A link, and who plays its process."""
    link = post(stack, [], [], Tls())
    link._socket, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
    link._socket.setblocking(False)
    theirs.send(DOWN.pack(1, 0.0) + pb.FromDrafter(welcome=pb.DraftWelcome()).SerializeToString())
    link.receive(0.0)
    return link, stack.enter_context(theirs)


def test_what_was_asked_for_is_read_in_portions(ends: tuple[LinkPost, socket]) -> None:
    link, theirs = ends
    for _ in range(4):
        assert link.send([Truth(1)] * 100)
    for _ in range(2):
        theirs.send(many(3000))
    for _ in range(2):
        assert sum(len(news.chains) for news in link.receive(0.0) if isinstance(news, Drafts)) == draft_post._CHAINS
    assert link.receive(0.0) == []


def test_a_flood_ends_the_session_and_is_not_dialled_again_soon(ends: tuple[LinkPost, socket]) -> None:
    link, theirs = ends
    assert link.send([Truth(1)])
    read: list[object] = []
    for _ in range(100):
        theirs.send(many(20))
        read += (news := link.receive(0.0))
        if any(isinstance(one, Gone) for one in news):
            break
    assert isinstance(read[-1], Gone)
    assert len(read) == (draft_post._CHAINS + draft_post._PER_ROW) // 20 + 1
    assert link.receive(0.0) == []
    assert link._process is None
    assert link._socket is None
