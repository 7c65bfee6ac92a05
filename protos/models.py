"""What tells one state of the served model from another, on both sides of a gateway's link."""

import hashlib
import json

from protos.link.v1.common_pb2 import ModelInfo


def digest(model: ModelInfo) -> str:
    """Equal digests mean equal models: the fingerprint stands for all that comes from the model's files."""
    told = [model.name, model.fingerprint, model.context_tokens, sorted(model.refused.items()), list(model.caveats)]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()
