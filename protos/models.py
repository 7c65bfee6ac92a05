"""The served model on the links: what tells one state of it from another, and its tokenizer in parts."""

import hashlib
import json
from collections.abc import Iterator

from protos.link.v1.common_pb2 import ModelInfo

PART_BYTES = 256 << 10  # a message of megabytes holds the event loop of the scheduler that reads it


def digest(model: ModelInfo) -> str:
    """Equal digests mean equal models: the fingerprint stands for all that comes from the model's files."""
    told = [model.name, model.fingerprint, model.context_tokens, sorted(model.refused.items()), list(model.caveats)]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def parts(tokenizer: bytes) -> Iterator[bytes]:
    """ModelInfo.tokenizer_json in messages' parts, in order."""
    for start in range(0, len(tokenizer), PART_BYTES):
        yield tokenizer[start : start + PART_BYTES]
