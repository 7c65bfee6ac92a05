"""What a drafter's model has done. Numbers alone."""

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Read by the event loop for metrics, at any moment; written by the model's thread."""

    passes: int = 0
    busy_s: float = 0.0
    guesses: int = 0
    caught_up: int = 0
    texts: int = 0
    free_blocks: int = 0
