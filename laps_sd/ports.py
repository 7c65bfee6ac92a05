"""Ports of this machine for the processes of a stack: those that were asked for, or free ones. Nothing listens here."""

import random
import socket
from collections.abc import Iterable
from contextlib import ExitStack

HOST = "127.0.0.1"

# Below the ports that systems give to outgoing connections (Linux: from 32768). Otherwise a connection could take the
# port of a child while that child is down. The child's own clients, which try again and again, would be the first.
_ANY_PORT, _PORT_TRIALS = range(20_000, 32_768), 64


class StackError(Exception):
    """The stack cannot start; the message says why and what to do."""


def claim_ports(*ports: int) -> list[int]:
    """These ports, with free ones in place of 0. They are chosen once, so that a child that is started again has the
    same port as before.

    Raises StackError if one is taken.
    """
    with ExitStack() as probes:
        claimed = []
        for port in ports:
            probe = probes.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            claimed.append(_bind(probe, [port] if port else random.sample(_ANY_PORT, _PORT_TRIALS)))
        return claimed


def _bind(probe: socket.socket, ports: Iterable[int]) -> int:
    """The first of them that is free. Raises StackError."""
    for port in ports:
        try:
            probe.bind((HOST, port))
            probe.listen()  # until then SO_REUSEADDR lets another probe have the same port
        except OSError as error:
            reason = f"cannot listen on {HOST}:{port}: {error.strerror}"
        else:
            return port
    raise StackError(f"{reason}; stop what runs there or choose another port")
