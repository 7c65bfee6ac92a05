"""What goes into the engine and what comes out: plain data. No tensors live here."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Finish(Enum):
    """Why a request has ended."""

    STOP = "stop"  # an end-of-sequence id, a stop string, or a structure that can go no further
    LENGTH = "length"  # max_tokens, or the model's context is full
    ERROR = "error"  # the request cannot be run; its row says why


class Skip(Enum):
    """Why a request that was to run in a step did not."""

    NO_BLOCKS = "no_blocks"  # no free block of KV was left for it
    PREEMPTED = "preempted"  # it ran in the step before, and others ran in its place
    # Its drafts are on their way, and a request that was ready ran in its place; or a pipeline has it in another batch.
    DEFERRED = "deferred"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How output tokens are drawn from the model's logits."""

    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0: all
    seed: int = 0  # uint64
    repetition_penalty: float = 1.0  # above 0; positive logits of tokens in prompt or output are divided by it
    presence_penalty: float = 0.0  # taken from the logits of tokens that are in the output
    frequency_penalty: float = 0.0  # taken from them once for each time that the token is in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, and what is added to their logits
    grammar: str = ""  # what the output must look like, in llguidance's form; empty: any text
    logprobs: int | None = None  # rows tell each token's log-probability, and those of this many likeliest tokens
    prompt_logprobs: int | None = None  # the row with the first token tells the same of the prompt
    embedding: bool = False  # it tells the prompt's embedding


@dataclass(frozen=True, slots=True)
class Limits:
    """When a request ends. Numbers are output tokens."""

    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Admission:
    """A request with all its tokens so far, which are the truth."""

    request_id: str
    placement: int
    tokens: Sequence[int]
    prompt_len: int
    sampling: Sampling
    limits: Limits
    salt: str = ""  # KV of equal beginnings of texts is shared among requests of equal salt, and no others
    error: str = ""  # why it cannot be run, if that is known already
    local_drafts: bool = False  # no drafter of another process may read its tokens


@dataclass(frozen=True, slots=True)
class Run:
    """One entry of a schedule. Both numbers are upper bounds: the engine may use less, and its row says how much."""

    request_id: str
    draft_len: int
    prefill_tokens: int
    here: bool = False  # no other process is to draft for it: others get the chains of such a drafter
    yields: bool = False  # while its drafts are on their way, the next request that is ready may run in its place


class Elsewhere(NamedTuple):
    """What drafts cost that another process makes while the target verifies, as measured. Seconds."""

    supply_s: float  # per position
    delay_s: float  # until what was verified comes back as drafts, beside the time that those take
    hit: float  # share of the rounds in which they were there when the round began
    chains: int  # requests that it drafts for at a time; 0: it is away
    fallback: float = 0.0  # drafts accepted in a round in which they were not there


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token, in the model's own distribution: before the structure, bias, penalties and temperature."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, best first


@dataclass(frozen=True, slots=True)
class Remaining:
    """What a probe reads of the output that remains after `after` tokens of it. `chances`: a byte q for each bin of
    `length_head.BINS`, whose probability is exp(-q / 16), but for rounding."""

    after: int
    chances: bytes


@dataclass(frozen=True, slots=True)
class Row:
    """What one step did for one request: its round."""

    request_id: str
    placement: int
    start: int  # output tokens before the round
    tokens: tuple[int, ...] = ()  # emitted; the last one ended the request if `finish` is set
    drafted: int = 0  # positions for which drafts were verified
    accepted: int = 0
    prefilled: int = 0  # tokens of the prompt, or of a text whose KV was lost, computed in this round
    blocks: int = 0  # of KV that no other request shares: dropping the request would free as many
    num_uncomputed: int = 0  # tokens that must be computed before it can draft
    finish: Finish | None = None
    skipped: Skip | None = None
    error: str = ""  # with Finish.ERROR
    logprobs: tuple[Logprob, ...] = ()  # one a token, where they are asked for
    remaining: Remaining | None = None  # where the probe was asked
    prompt_logprobs: tuple[Logprob, ...] = ()  # with the first token: of the prompt's, from its second on
    embedding: tuple[float, ...] = ()  # with the first token
    branched: int = 0  # drafts that were verified beside one for each position


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step. Seconds: `draft_s` of the drafter, `verify_s` of the target's forward pass, `wait_s` of waiting for
    drafts from elsewhere, `other_s` of the rest. `apart`: the requests whose drafts another process had made."""

    rows: tuple[Row, ...]
    free_blocks: int
    draft_s: float
    verify_s: float
    other_s: float
    wait_s: float = 0.0
    apart: frozenset[str] = frozenset()
    elsewhere: Elsewhere | None = None  # None: nothing is drafted in another process
    positions: int = 0  # for which drafts were computed here, one after the other

    @property
    def ran(self) -> tuple[Row, ...]:
        """The rows of requests that advanced or ended. Without any, the same schedule would get nowhere again."""
        return tuple(row for row in self.rows if row.skipped is None)


@dataclass(frozen=True, slots=True)
class Held:
    """A request that the engine knows, and how much of its KV there is."""

    request_id: str
    placement: int
    output_tokens: int
    blocks: int = 0  # of KV, as in Row
    offloaded: int = 0  # blocks of KV in the host's memory
    num_uncomputed: int = 0  # as in Row


@dataclass(frozen=True, slots=True)
class CostProfile:
    """What a step costs, in seconds. With n drafts for each of b requests:
    n * (draft_s + verify_token_s * b) + verify_s + verify_slope_s * (b - 1), and prefill_token_s for each token
    prefilled."""

    draft_s: float  # for each position drafted
    verify_s: float  # one forward pass for one request without drafts
    verify_slope_s: float  # for each further request of the batch
    prefill_token_s: float
    verify_token_s: float  # for each draft token verified
    offload_block_s: float = 0.0  # for a block of KV, to the host's memory and back; 0: there is no room for it there
    supply_s: float = 0.0  # as in Elsewhere, and below
    delay_s: float = 0.0
    hit: float = 1.0
    chains: int = 0  # 0: nothing is drafted in another process
    fallback: float = 0.0
    wait_s: float = 0.0  # that a step waits for such drafts, in the mean

    def step_s(self, drafted: Sequence[int], prefilled: int) -> float:
        """Of a step that drafts `drafted` tokens, one number a request, and prefills `prefilled` tokens in all."""
        drafting_s = max(drafted) * self.draft_s + sum(drafted) * self.verify_token_s
        prefill_s = prefilled * self.prefill_token_s
        return drafting_s + prefill_s + self.verify_s + (len(drafted) - 1) * self.verify_slope_s


class Place(NamedTuple):
    """A stage: its number among the `size` that a model's layers are spread over. The first one leads."""

    number: int = 0
    size: int = 1

    def layers(self, total: int) -> range:
        """Its own, of `total`: as many as the others', or one more. Raises ValueError if there are too few for all."""
        if total < self.size:
            raise ValueError(f"has {total} layers, which cannot be spread over {self.size} stages")
        return range(self.number * total // self.size, (self.number + 1) * total // self.size)
