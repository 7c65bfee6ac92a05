"""Bytes for an interface, from sense to nonsense, the same for the same source of chance. Nothing is sent here."""

import struct
from collections.abc import Iterator
from random import Random
from typing import Any, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import EncodeError, Message

# Characters of several bytes, of several code points, without width, from right to left, of the model's own template.
TEXTS = (
    "a", "é", "e\u0301", "\u0301", "漢字", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea",
    "\u202eabc", "\ufeff", "\x00", "\n", "\u2028", "\ufffd", "<|im_start|>", "<|im_end|>", "{{ 7 * 7 }}", "{% x %}",
    "The quick brown fox", " ", "\t", "'; DROP", "../../etc/passwd", "%s%n", "\U0010ffff", "İ", "ﷺ",
)  # fmt: skip
FLOATS = (0.0, -0.0, 1e-45, 1e-9, 0.5, 1.0, 2.0, 100.0, 1e30, -1.0, float("inf"), float("-inf"), float("nan"))
COUNTS = (0, 1, 2, 3, 10, 300, 5000)  # of entries in a repeated field; most often few
_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


def mutated(random: Random, seed: Message) -> bytes:
    """A message like `seed`: as it is, with some fields changed, with some bytes changed, or nothing of it left."""
    message = type(seed)()
    message.CopyFrom(seed)
    kind = random.random()
    if kind < 0.04:
        return random.randbytes(random.choice((0, 1, 2, 7, 100, 5000)))
    if kind < 0.92:
        for _ in range(random.choice((0, 1, 1, 1, 2, 3, 5))):
            _change(random, message)
    try:
        raw = message.SerializeToString()
    except EncodeError:  # a string that is no UTF-8 after all
        return b""
    return _damage(random, raw) if kind > 0.8 else raw


def _change(random: Random, root: Message) -> None:
    """One field, somewhere in the tree, gets another value or none."""
    message = random.choice(list(_tree(root)))
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field = random.choice(fields)
    if random.random() < 0.2:
        message.ClearField(field.name)
    elif _is_map(field):
        entries = getattr(message, field.name)
        for _ in range(_count(random)):
            key, value = (_scalar_of(random, field, name) for name in ("key", "value"))
            if value is None:  # a message
                _fill(random, entries[key])
            else:
                entries[key] = value
    elif field.is_repeated:
        entries = getattr(message, field.name)
        for _ in range(_count(random)):
            if field.message_type is None:
                entries.append(_scalar(random, field))
            elif entries and random.random() < 0.5:
                entries.add().CopyFrom(random.choice(entries))
            else:
                _fill(random, entries.add())
    elif field.message_type is None:
        setattr(message, field.name, _scalar(random, field))
    else:
        _fill(random, getattr(message, field.name))


def _scalar_of(random: Random, field: FieldDescriptor, part: str) -> Any:
    """For a key or a value of a map; None for a message."""
    own = field.message_type.fields_by_name[part]
    return _scalar(random, own) if own.message_type is None else None


def _tree(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is None or _is_map(field):
            continue
        for child in list(value)[:8] if field.is_repeated else (value,):
            yield from _tree(child)


def _fill(random: Random, message: Message) -> None:
    message.SetInParent()
    for field in cast(Descriptor, message.DESCRIPTOR).fields:
        if field.message_type is None and not field.is_repeated and random.random() < 0.5:
            setattr(message, field.name, _scalar(random, field))


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _count(random: Random) -> int:
    return random.choice(COUNTS) if random.random() < 0.1 else random.randint(1, 3)


def _scalar(random: Random, field: FieldDescriptor) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            string = text(random)
            return string if field.type == FieldDescriptor.TYPE_STRING else string.encode()
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return random.choice(FLOATS) if random.random() < 0.7 else random.uniform(-3, 3)
        case FieldDescriptor.CPPTYPE_BOOL:
            return random.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return random.choice((*(value.number for value in field.enum_type.values), 99, -1))
    lowest, highest = _BITS[field.cpp_type]
    near = random.choice((0, 1, 2, 7, 255, 256, 1024, 65536, lowest, highest, highest >> 1))
    return min(max(near + random.choice((0, 0, -1, 1)), lowest), highest)


def text(random: Random) -> str:
    """Some pieces in a row; now and then so many that no bound holds them."""
    pieces = random.choices(TEXTS, k=random.choice((0, 1, 2, 3, 8)))
    return "".join(pieces) * (random.choice((200, 3000)) if random.random() < 0.01 else 1)


def _damage(random: Random, raw: bytes) -> bytes:
    """Bits flipped, bytes cut, doubled or put in: what no library would have written."""
    damaged = bytearray(raw)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(damaged) + 1)
        match random.randrange(5):
            case 0 if at < len(damaged):
                damaged[at] ^= 1 << random.randrange(8)
            case 1:
                del damaged[at : at + random.randint(1, 8)]
            case 2:
                damaged[at:at] = damaged[at : at + random.randint(1, 32)]
            case 3:  # a field with a length that it does not have
                damaged[at:at] = bytes([random.randrange(256)]) + random.choice((b"\xff\xff\xff\xff\x0f", b"\x7f"))
            case _:
                damaged[at:at] = struct.pack("<Q", random.getrandbits(64))
    return bytes(damaged)
