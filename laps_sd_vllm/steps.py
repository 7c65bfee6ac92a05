"""What goes into a directed scheduler and what it reports: plain data. Nothing of vLLM is imported here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# vLLM's states of a request whose answer is whole. With any other it was broken off.
TO_THE_END = ("FINISHED_STOPPED", "FINISHED_REPETITION", "FINISHED_LENGTH_CAPPED")


@dataclass(frozen=True, slots=True)
class Place:
    """One place of a ranking. Both numbers are upper bounds.

    `prefill_tokens` is 0 (it computes nothing of its prompt) or more: vLLM bounds the chunks of all requests alike.
    """

    request_id: str
    draft_len: int = 1 << 30
    prefill_tokens: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Desired:
    """Run the first `slots` runnable requests of `rank`, best first. Requests that are not in it do not run."""

    rank: Sequence[Place]
    slots: int


@dataclass(slots=True)
class StepRow:
    """The outcome of one step for one request."""

    request_id: str
    start: int  # output tokens before
    tokens: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    prefilled: int = 0  # tokens computed of the prompt, or of a text whose KV was lost
    prefill_owed: int = 0  # such tokens still to be computed
    blocks: int = 0  # of KV that only it holds; 0 where `count_blocks` is off
    status: Any = None  # vLLM's RequestStatus, if it has ended
    stop_reason: int | str | None = None
    logprobs: Any = None  # as vLLM's EngineCoreOutput has them
    evicted: bool = False  # vLLM took its KV, since memory ran out; it did not run


@dataclass(slots=True)
class StepDone:
    """One step, when its output is there. Times are of `time.perf_counter`."""

    rows: list[StepRow]
    free_blocks: int
    scheduled_at: float
    done_at: float
    skipped: list[str] = field(default_factory=list)  # chosen, and not scheduled
