"""How stages meet: all others come to the first one's address, are told who comes next, and connect. What they say
then goes by the links of ring.py.

Who is no stage, or one of another model, is sent away in words: it cannot hold up those that belong here for long.
"""

import hmac
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

from worker_service.engine.parallel import ParallelError
from worker_service.engine.stages import Call
from worker_service.engine.types import Place
from worker_service.model_files import ModelError
from worker_service.ring import MOST_HELLO, START_S, Follower, Leader, MakeLink, StageLink, StrangerError

PROTOCOL = 2
HELLO_S = 10.0  # for what a newcomer says first
RETRY_S = 0.2


def listen(address: str, backlog: int) -> socket.socket:
    """Raises ModelError where no port of this machine has this address, OSError where it is taken, or a name that is
    not there yet."""
    host, port = _parts(address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as error:
        if error.errno is not None and "assign" in str(error).lower():
            raise ModelError(f"rendezvous {address}: no address of this machine, which leads as stage 0") from error
        raise OSError(f"rendezvous {address}: {error.strerror}") from error


def gather(
    place: Place,
    server: socket.socket,
    about: Mapping[str, Any],
    make: MakeLink = StageLink,
    within_s: float = START_S,
) -> Leader:
    """At the first stage: returns when all others have come to the port `server`, which is closed then.

    `about`: what must be equal at all of them. Who is no stage, or of another model, is told so and sent away. Raises
    ParallelError when they do not come.
    """
    deadline = time.monotonic() + within_s
    came: dict[int, tuple[StageLink, int]] = {}
    with server:
        while len(came) < place.size - 1:
            try:
                connection = _accept(server, deadline)
            except TimeoutError:
                missing = sorted(set(range(1, place.size)) - set(came))
                raise ParallelError(f"stages that did not come: {', '.join(map(str, missing))}") from None
            with ExitStack() as unless_kept:
                unless_kept.callback(connection.close)
                with suppress(ParallelError):
                    number, link, port = _welcome(place, connection, about, came, make)
                    came[number] = link, port
                    unless_kept.pop_all()
    token = secrets.token_hex(16)
    for number, (link, _) in came.items():
        after = came.get(number + 1)
        link.send(Call("welcome", (token, [after[0].other_host, after[1]] if after else None)))
    return Leader([came[number][0] for number in range(1, place.size)])


def _welcome(
    place: Place,
    connection: socket.socket,
    about: Mapping[str, Any],
    came: Mapping[int, tuple[StageLink, int]],
    make: MakeLink,
) -> tuple[int, StageLink, int]:
    """A newcomer's number, and where the one before it finds it. Raises ParallelError."""
    first = StageLink(connection, "somebody")
    match first.receive(HELLO_S, MOST_HELLO):
        case "hello", [int(protocol), int(number), int(size), dict(its), int(port)], _:
            problem = ""
            if protocol != PROTOCOL:
                problem = f"it speaks version {protocol} of what stages say, not {PROTOCOL}"
            elif not 0 <= port < 1 << 16:
                problem = f"it waits for the stage before it at port {port}"
            elif size != place.size or not 0 < number < size:
                problem = f"it is stage {number} of {size}, where --stages is {place.size}"
            elif number in came and not came[number][0].ended:
                problem = f"there is a stage {number} already"
            elif differing := [name for name, own in about.items() if its.get(name) != own]:
                name = differing[0]
                problem = f"its {name} is {its.get(name)}, that of stage 0 {about[name]}"
            if problem:
                first.send(Call("refused", (problem,)))
                raise StrangerError(problem)
            return number, make(connection, f"stage {number}"), port
    raise StrangerError("no hello")


def join(place: Place, address: str, about: Mapping[str, Any], make: MakeLink = StageLink) -> Follower:
    """At any other stage: returns when all have come to the rendezvous `address` of the first. Raises ModelError where
    it is wrong or this stage is refused, ParallelError."""
    connection = _dial(_parts(address), START_S, address)
    leader = make(connection, "stage 0")
    with ExitStack() as stack:
        port, server = 0, None
        if place.number > 1:
            server = stack.enter_context(listen(f"[{leader.own_host}]:0", 1))
            port = server.getsockname()[1]
        try:
            leader.send(Call("hello", (PROTOCOL, place.number, place.size, dict(about), port)))
            match leader.receive(START_S, MOST_HELLO):
                case "welcome", [str(token), after], _:
                    pass
                case "refused", [problem], _:
                    raise ModelError(f"rendezvous {address}: this stage is refused: {problem}")
                case _:
                    raise StrangerError("neither welcome nor refused")
        except StrangerError:
            raise ModelError(f"rendezvous {address}: what answers there is no stage of LAPS-SD") from None
        onward = leader
        if after is not None:
            host, port = after
            onward = make(_dial((host, port), HELLO_S, f"{host}:{port}"), f"stage {place.number + 1}")
            onward.send(Call("here", (token,)))
        before = leader if server is None else _before(server, token, make, place.number - 1)
    return Follower(leader, before, onward)


def _before(server: socket.socket, token: str, make: MakeLink, number: int) -> StageLink:
    """The connection of the stage before, which knows the token. Raises ParallelError."""
    deadline = time.monotonic() + 6 * HELLO_S
    while True:
        try:
            connection = _accept(server, deadline)
        except TimeoutError:
            raise ParallelError(f"stage {number} did not come") from None
        with ExitStack() as unless_kept, suppress(ParallelError):
            unless_kept.callback(connection.close)
            match StageLink(connection, "somebody").receive(HELLO_S, MOST_HELLO):
                case "here", [str(said)], _ if hmac.compare_digest(said.encode(errors="replace"), token.encode()):
                    unless_kept.pop_all()
                    return make(connection, f"stage {number}")


def _accept(server: socket.socket, deadline: float) -> socket.socket:
    """The next connection. Raises TimeoutError after `deadline`, in time.monotonic(), however many came before."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    server.settimeout(left)
    return server.accept()[0]


def _dial(where: tuple[str, int], within_s: float, name: str) -> socket.socket:
    """Tries again until somebody answers, and while names cannot be asked for. Raises ParallelError, at once for no
    name at all: it is misspelt, or that of a container which is not up yet."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            connection = socket.create_connection(where, timeout=HELLO_S)
            # On one machine a port that nobody listens on may be drawn for this very connection.
            if connection.getsockname() != connection.getpeername():
                return connection
            connection.close()
        except OSError as error:
            if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
                raise ParallelError(f"rendezvous {name}: {error.strerror}") from error
            if time.monotonic() > deadline:
                raise ParallelError(f"rendezvous {name}: nobody answers: {error}") from error
        time.sleep(RETRY_S)


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
