"""What goes into the engine and what comes out: plain data. No tensors live here."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Finish(Enum):
    STOP = "stop"  # an end-of-sequence id or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    ERROR = "error"  # the request cannot be run; its row says why


class Skip(Enum):
    NO_BLOCKS = "no_blocks"  # KV memory ran out: the lowest-ranked wait


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0: all
    seed: int = 0  # uint64
    repetition_penalty: float = 1.0  # above 0; positive logits of tokens in prompt or output are divided by it
    presence_penalty: float = 0.0  # taken from the logits of tokens that are in the output
    frequency_penalty: float = 0.0  # and this as often as they are
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, and what is added to their logits
    logprobs: int | None = None  # rows tell each token's log-probability, and those of so many likeliest


@dataclass(frozen=True, slots=True)
class Limits:
    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """One place of a ranking. Both numbers are upper bounds: the engine clips, and its row says what it used."""

    request_id: str
    draft_len: int
    prefill_tokens: int


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one emitted token, in the model's own distribution: before bias, penalties, temperature, top-k and top-p."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, best first


@dataclass(frozen=True, slots=True)
class Row:
    """What one round did for one request."""

    request_id: str
    placement: int
    start: int  # output tokens before the round
    tokens: tuple[int, ...] = ()  # emitted; the last one ended the request if `finish` is set
    drafted: int = 0
    accepted: int = 0
    prefilled: int = 0  # tokens of prompt, or of lost KV, computed in this round
    blocks: int = 0  # of KV that only it holds now: what dropping it would free
    prefill_owed: int = 0  # tokens still to be computed before it can draft
    finish: Finish | None = None
    skipped: Skip | None = None
    error: str = ""  # with Finish.ERROR
    logprobs: tuple[Logprob, ...] = ()  # one a token, where they are asked for


@dataclass(frozen=True, slots=True)
class StepResult:
    """One round. `verify_s` is the target's forward pass, `other_s` all that is neither it nor drafting; seconds."""

    rows: tuple[Row, ...]
    free_blocks: int
    draft_s: float
    verify_s: float
    other_s: float

    @property
    def ran(self) -> bool:
        """Whether any request advanced or ended: running the same ranking again may then do more."""
        return any(row.skipped is None for row in self.rows)


@dataclass(frozen=True, slots=True)
class Held:
    request_id: str
    placement: int
    output_tokens: int
    blocks: int = 0  # of KV, as in Row
    offloaded: int = 0  # blocks of KV in the host's memory
    prefill_owed: int = 0


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Seconds. A round of b requests with n drafts each costs n * (draft_s + verify_token_s * b) + verify_s
    + verify_slope_s * (b - 1)."""

    draft_s: float  # per draft position
    verify_s: float  # one verify pass, batch 1
    verify_slope_s: float  # per further request of the batch
    prefill_token_s: float
    verify_token_s: float  # per draft token verified
    offload_block_s: float = 0.0  # per block of KV, to the host's memory and back; 0: there is none for it

    def round_s(self, drafted: Sequence[int], prefilled: int) -> float:
        """Of a round with so many tokens drafted for each of its requests, and so many of prompts computed."""
        drafting_s = max(drafted) * self.draft_s + sum(drafted) * self.verify_token_s
        prefill_s = prefilled * self.prefill_token_s
        return drafting_s + prefill_s + self.verify_s + (len(drafted) - 1) * self.verify_slope_s
