"""The served model on the links: what tells one state of it from another, and its tokenizer in parts."""

import hashlib
import json
import zlib
from collections.abc import Iterator

from protos.link.v1.common_pb2 import ModelInfo

PART_BYTES = 256 << 10  # a message of megabytes holds the event loop of the scheduler that reads it

MOST_TOKENIZER_BYTES = 128 << 20  # unpacked: a large one has 40 MB; a message of 32 MB could unpack to 32 GB


def digest(model: ModelInfo) -> str:
    """Equal digests mean equal models: the fingerprint stands for all that comes from the model's files."""
    told = [model.name, model.fingerprint, model.context_tokens, sorted(model.refused.items()), list(model.caveats)]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def parts(tokenizer: bytes) -> Iterator[bytes]:
    """ModelInfo.tokenizer_json in messages' parts, in order."""
    for start in range(0, len(tokenizer), PART_BYTES):
        yield tokenizer[start : start + PART_BYTES]


def unpacked(tokenizer: bytes) -> str:
    """The JSON text in ModelInfo.tokenizer_json. Raises ValueError if it is too long, or not gzip and UTF-8."""
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)  # with gzip's head
    try:
        text = unpacker.decompress(tokenizer, MOST_TOKENIZER_BYTES)
    except zlib.error as error:
        raise ValueError(f"the tokenizer is no gzip: {error}") from error
    if not unpacker.eof:
        raise ValueError(f"the tokenizer is cut short, or unpacks to more than {MOST_TOKENIZER_BYTES} bytes")
    return text.decode()
