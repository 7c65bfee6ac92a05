"""The connections of stages: who may come, what is no message, and what is told when somebody is gone."""

import asyncio
import signal
import socket
import struct
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Event
from typing import Any

import pytest

from worker_service import own_engine, rendezvous
from worker_service.engine.parallel import ParallelError
from worker_service.engine.stages import Call
from worker_service.engine.types import Place
from worker_service.model_files import ModelError, TooLittleMemoryError
from worker_service.rendezvous import PROTOCOL, gather, join, listen
from worker_service.ring import MOST_HELLO, StageLink, StrangerError

WAIT_S = 60.0
ABOUT = {"model": "m", "dtype": "float32"}


@pytest.fixture
def pair() -> Iterator[tuple[StageLink, socket.socket]]:
    """A link, and what is at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        link = StageLink(server.accept()[0], "stage 1")
    with other:
        yield link, other
        link.close()


def test_what_is_sent_comes_whole(pair: tuple[StageLink, socket.socket]) -> None:
    link, other = pair
    body = bytes(range(256)) * 40_000
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(StageLink(other, "stage 0").send, Call("compute", ([1, 2], {"a": None}), body))
        found = link.receive(WAIT_S)
        sending.result(WAIT_S)
    assert (found.name, found.arguments, bytes(found.body)) == ("compute", [[1, 2], {"a": None}], body)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!4sII", b"LSDs", 1 << 30, 0),
        struct.pack("!4sII", b"LSDs", 2, 1 << 31) + b"[]",
        struct.pack("!4sII", b"LSDs", 2, 9) + b"[]",  # hidden states of somebody unknown
        struct.pack("!4sII", b"LSDs", 2, 0) + b"[]",
        struct.pack("!4sII", b"LSDs", 2, 0) + b"{x",
        struct.pack("!4sII", b"LSDs", 2, 0) + b"17",
        struct.pack("!4sII", b"LSDs", 1 << 16, 0) + b"[" * (1 << 16),  # deeper than any parser goes
    ],
)
def test_what_is_no_message_is_told_from_a_lost_connection(pair: tuple[StageLink, socket.socket], said: bytes) -> None:
    link, other = pair
    other.sendall(said)
    with pytest.raises(StrangerError, match="what is no message between stages"):
        link.receive(WAIT_S, MOST_HELLO)


@pytest.mark.parametrize("said", [b"", b"LS", struct.pack("!4sII", b"LSDs", 40, 0) + b"[1"])
def test_a_connection_that_ends_is_a_lost_stage(pair: tuple[StageLink, socket.socket], said: bytes) -> None:
    link, other = pair
    other.sendall(said)
    other.close()
    with pytest.raises(ParallelError, match="stage 1 is gone: the connection ended"):
        link.receive(WAIT_S)
    assert link.ended


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no such bound")
def test_a_machine_that_is_gone_is_noticed_as_soon_while_something_is_under_way_to_it(
    pair: tuple[StageLink, socket.socket],
) -> None:
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    idle, interval, count, unacknowledged = (
        pair[0]._socket.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names
    )
    assert unacknowledged == 1000 * (idle + interval * count) == 30_000


def test_who_says_nothing_is_given_up(pair: tuple[StageLink, socket.socket]) -> None:
    with pytest.raises(ParallelError, match="stage 1 is gone: timed out"):
        pair[0].receive(0.01)


def test_who_says_a_byte_now_and_then_is_given_up(pair: tuple[StageLink, socket.socket]) -> None:
    link, other = pair
    done = Event()

    def drip() -> None:
        with suppress(OSError):
            other.sendall(struct.pack("!4sII", b"LSDs", MOST_HELLO, 0))
            while not done.wait(0.001):
                other.sendall(b" ")

    with ThreadPoolExecutor() as pool:
        dripping = pool.submit(drip)
        try:
            with pytest.raises(ParallelError, match="stage 1 is gone: timed out"):
                link.receive(0.1, MOST_HELLO)
        finally:
            done.set()
        dripping.result(WAIT_S)


def test_a_hello_with_an_impossible_port_is_refused() -> None:
    server = listen("127.0.0.1:0", 8)
    address = f"127.0.0.1:{server.getsockname()[1]}"
    liar = StageLink(socket.create_connection(server.getsockname()), "stage 0")
    liar.send(Call("hello", (PROTOCOL, 1, 2, ABOUT, 1 << 20)))
    with ThreadPoolExecutor() as pool:
        gathering = pool.submit(gather, Place(0, 2), server, ABOUT, within_s=WAIT_S)
        name, problem, _ = liar.receive(WAIT_S)
        pool.submit(join, Place(1, 2), address, ABOUT).result(WAIT_S)
        gathering.result(WAIT_S)
    assert (name, problem) == ("refused", ["it waits for the stage before it at port 1048576"])
    liar.close()


def test_an_answer_to_hello_that_is_neither_welcome_nor_refused_is_a_sentence() -> None:
    server = listen("127.0.0.1:0", 1)
    address = f"127.0.0.1:{server.getsockname()[1]}"
    with server, ThreadPoolExecutor() as pool:
        joining = pool.submit(join, Place(1, 2), address, ABOUT)
        other = StageLink(server.accept()[0], "stage 1")
        other.send(Call("compute", (1, 2, 3)))
        with pytest.raises(ModelError, match="what answers there is no stage of LAPS-SD"):
            joining.result(WAIT_S)
        other.close()


def meet(size: int, strangers: int = 0) -> tuple[Any, list[Any]]:
    server = listen("127.0.0.1:0", 8)
    address = f"127.0.0.1:{server.getsockname()[1]}"
    with ThreadPoolExecutor() as pool:
        for _ in range(strangers):
            with socket.create_connection(server.getsockname()) as stranger:
                stranger.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        joining = [pool.submit(join, Place(number, size), address, ABOUT) for number in range(1, size)]
        leader = gather(Place(0, size), server, ABOUT, within_s=WAIT_S)
        return leader, [each.result(WAIT_S) for each in joining]


def test_messages_go_round_in_order_and_strangers_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def found_by_a_stranger(address: str, backlog: int) -> socket.socket:
        """Where a stage waits for the one before it."""
        server = listen(address, backlog)
        stranger = StageLink(socket.create_connection(server.getsockname()), "stage 2")
        stranger.send(Call("here", ("\ud800",)))  # half a character
        stranger.close()
        return server

    monkeypatch.setattr(rendezvous, "listen", found_by_a_stranger)
    leader, followers = meet(4, strangers=3)
    leader.call(Call("compute", (0,)))
    for number, follower in enumerate(followers, 1):
        call = follower._before.receive(WAIT_S)
        assert list(call.arguments) == list(range(number))
        follower._after.send(Call("compute", (*call.arguments, number)))
    assert leader.answer().arguments == [0, 1, 2, 3]
    assert [follower.last for follower in followers] == [False, False, True]


def test_a_stage_that_cannot_load_is_named_by_the_first() -> None:
    leader, followers = meet(3)
    followers[0].loaded()
    followers[1].loaded(problem="too few weights")
    with pytest.raises(ModelError, match="stage 2: too few weights"):
        leader.loaded()


def test_the_others_hear_why_the_first_gives_up() -> None:
    leader, followers = meet(3)
    leader.leave("its layer 3 has no attention")
    for follower in followers:
        with pytest.raises(ModelError, match="its layer 3 has no attention"):
            follower.follow(Namespace(problem=""))


def test_a_process_with_a_share_outlives_the_signals_that_end_its_leader_in_order() -> None:
    numbers, heard = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP), []
    before = [signal.signal(number, lambda number, _: heard.append(number)) for number in numbers]
    try:
        own_engine._end_with_the_leader()
        for number in numbers:
            signal.raise_signal(number)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert not heard


def test_a_stage_with_too_little_memory_has_all_others_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By exit code 1. It says nothing, and so does the first: what they say is for what no other time mends."""
    leader, followers = meet(4)

    def too_little(*_: Any) -> None:
        raise TooLittleMemoryError("too little memory")

    async def load(*_: Any) -> bool:
        await asyncio.to_thread(leader.loaded)
        raise AssertionError

    settings = Namespace(place=Place(3, 4), model="m", dtype="float32", device="cpu", rendezvous="", threads=0)
    settings.log_level, settings.worker_id = "error", "w"
    for name in ("find", "check_directory", "read_config", "fingerprint", "choose_dtype", "choose_device"):
        monkeypatch.setattr(own_engine, name, lambda *_, **__: "")
    monkeypatch.setattr(own_engine, "join", lambda *_: followers[2])
    monkeypatch.setattr(own_engine, "_load", too_little)
    monkeypatch.setattr(own_engine, "serve", load)
    for follower in followers[:2]:
        follower.loaded()
    with pytest.raises(TooLittleMemoryError):
        own_engine.stage(settings)
    for link in (followers[2]._leader, followers[2]._before):  # as its process ends
        link.close()
    with pytest.raises(ParallelError, match="stage 3 is gone"):
        asyncio.run(own_engine._lead(settings, leader))
    for follower in followers[:2]:
        with pytest.raises(ParallelError, match="is gone"):
            follower.follow(Namespace(problem=""))
        for link in (follower._leader, follower._before, follower._after):
            link.close()


def test_stages_that_do_not_come_are_named() -> None:
    with pytest.raises(ParallelError, match="stages that did not come: 1, 2"):
        gather(Place(0, 3), listen("127.0.0.1:0", 3), ABOUT, within_s=0.01)


def test_nobody_at_the_rendezvous_is_told_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "START_S", 0.0)
    with listen("127.0.0.1:0", 1) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(ParallelError, match=f"rendezvous {address}: nobody answers"):
        join(Place(1, 2), address, ABOUT)


def test_a_name_that_cannot_be_asked_for_now_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [socket.gaierror(socket.EAI_AGAIN, "try again"), socket.gaierror(socket.EAI_NONAME, "no such name")]

    def ask(*_: Any, **__: Any) -> None:
        raise answers.pop(0)

    monkeypatch.setattr(socket, "create_connection", ask)
    monkeypatch.setattr(rendezvous, "RETRY_S", 0.0)
    with pytest.raises(ParallelError, match="rendezvous host:1: no such name"):  # which is told at once
        join(Place(1, 2), "host:1", ABOUT)
    assert not answers


def test_a_name_that_the_first_stage_does_not_have_yet_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    with pytest.raises(OSError, match="rendezvous host:1: no such name"):
        listen("host:1", 1)


def test_a_second_stage_of_a_number_is_refused_and_one_that_died_makes_room() -> None:
    server = listen("127.0.0.1:0", 8)
    address = f"127.0.0.1:{server.getsockname()[1]}"
    dead = StageLink(socket.create_connection(server.getsockname()), "stage 0")
    dead.send(Call("hello", (PROTOCOL, 1, 3, ABOUT, 0)))
    dead.close()
    with ThreadPoolExecutor() as pool:
        gathering = pool.submit(gather, Place(0, 3), server, ABOUT, within_s=WAIT_S)
        first = pool.submit(join, Place(1, 3), address, ABOUT)
        # Both wait for stage 2, so one of these two is the second.
        second = pool.submit(join, Place(1, 3), address, ABOUT)
        wait([first, second], WAIT_S, FIRST_COMPLETED)
        refused = first if first.done() else second
        with pytest.raises(ModelError, match="this stage is refused: there is a stage 1 already"):
            refused.result()
        pool.submit(join, Place(2, 3), address, ABOUT).result(WAIT_S)
        gathering.result(WAIT_S)
