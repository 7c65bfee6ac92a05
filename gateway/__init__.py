"""The front door: access, validation, text to tokens and back, the public gRPC interface. No queue, no weights."""
