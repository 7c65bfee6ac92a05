"""The Open Inference Protocol, as Triton's clients speak it."""
