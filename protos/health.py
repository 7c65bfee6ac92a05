"""Asks a health port (grpc.health.v1, plaintext) whether it is SERVING. For the checks of containers, which ask often:
it needs sockets alone, so `python -IS health.py HOST:PORT [SERVICE]` costs a start of the interpreter and no more.

One call as HTTP/2 has it (RFC 9113): every header is sent literally, and of the answer only the message is read.
"""

import socket
import sys
import time

TIMEOUT_S = 5.0
PLAINTEXT = "http://"  # may stand before HOST:PORT

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _GOAWAY = 0, 1, 4, 7  # types of frames
_END_STREAM, _END_HEADERS = 1, 4
_FRAME_BYTES, _MESSAGE_BYTES = 9, 5  # of what stands before a frame, and before gRPC's message in it
_SERVING = b"\x08\x01"  # a HealthCheckResponse: its field `status`, 1
_MOST_FRAMES = 64  # before the answer


def is_serving(target: str, service: str = "") -> bool:
    """Whether the server at HOST:PORT says that `service` is ready ("": that its process lives). False if it cannot be
    reached, does not answer within TIMEOUT_S, does not know the service, or asks for TLS."""
    host, _, port = target.removeprefix(PLAINTEXT).rpartition(":")
    until = time.monotonic() + TIMEOUT_S
    try:
        with socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S) as connection:
            connection.sendall(_call(host, service.encode()))
            return _answer(connection, until) == _SERVING
    except (OSError, ValueError):
        return False


def _call(host: str, service: bytes) -> bytes:
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/grpc.health.v1.Health/Check",
        ":authority": host,
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
    request = b"\x0a" + _text(service.decode()) if service else b""  # its field `service`
    message = b"\0" + len(request).to_bytes(4, "big") + request
    return (
        _PREFACE
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, _END_HEADERS, 1, block)
        + _frame(_DATA, _END_STREAM, 1, message)
    )


def _text(word: str) -> bytes:
    """With its length before it. Raises ValueError if that is longer than one byte says."""
    coded = word.encode()
    if len(coded) > 126:
        raise ValueError(word)
    return bytes([len(coded)]) + coded


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _answer(connection: socket.socket, until: float) -> bytes:
    """The message of the answer; empty if it has none. Raises OSError if nothing comes."""
    for _ in range(_MOST_FRAMES):
        head = _read(connection, _FRAME_BYTES, until)
        payload = _read(connection, int.from_bytes(head[:3], "big"), until)
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
        if kind == _DATA and stream == 1:
            return payload[_MESSAGE_BYTES:]
        if kind == _GOAWAY or (kind == _HEADERS and flags & _END_STREAM):
            break
    return b""


def _read(connection: socket.socket, size: int, until: float) -> bytes:
    read = b""
    while len(read) < size:
        connection.settimeout(max(until - time.monotonic(), 1e-3))
        if not (part := connection.recv(size - len(read))):
            raise ConnectionError("the server hung up")
        read += part
    return read


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -IS health.py HOST:PORT [SERVICE]")
    sys.exit(0 if is_serving(*sys.argv[1:]) else 1)
