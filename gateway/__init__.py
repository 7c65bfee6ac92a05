"""The front door: validation, text <-> tokens, the public gRPC API. Never queue state, never a model's weights."""
