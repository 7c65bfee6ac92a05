"""How a scheduler and its training process speak: frames over pipes, four bytes of length before each."""

import struct
from typing import BinaryIO

HEAD = struct.Struct("<I")


def framed(payload: bytes) -> bytes:
    return HEAD.pack(len(payload)) + payload


def read_frame(pipe: BinaryIO) -> bytes | None:
    """None once the other end is gone, in mid-frame or not."""
    head = pipe.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (size,) = HEAD.unpack(head)
    payload = pipe.read(size)
    return payload if len(payload) == size else None
