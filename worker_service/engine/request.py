"""One request inside the engine: its tokens, its KV, and when it ends. Which requests run is not decided here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from worker_service.engine.counted import Counted
from worker_service.engine.kv import KV
from worker_service.engine.matcher import Matcher
from worker_service.engine.stop import StopStrings
from worker_service.engine.types import Admission, Finish, Held, Logprob, Row


@dataclass(slots=True)
class Saved:
    """A copy of KV in the host's memory: so many `blocks`, of which the first `length` tokens can be used."""

    blocks: int
    length: int


class EngineRequest:
    """Tokens are the truth; `kv` holds the first `kv.length` of them, never the last, and none while `saved` does."""

    def __init__(
        self,
        admission: Admission,
        *,
        kv: KV,
        stops: StopStrings,
        eos_ids: frozenset[int],
        context_tokens: int,
        matcher: Matcher | None = None,
    ) -> None:
        """`stops` and `matcher` have seen the tokens of output that exist."""
        self.id, self.placement = admission.request_id, admission.placement
        self.tokens, self.prompt_len = list(admission.tokens), admission.prompt_len
        self.sampling, self.limits, self.salt = admission.sampling, admission.limits, admission.salt
        self.local_drafts = admission.local_drafts
        self.kv = kv
        self.counted = Counted(self.prompt_len)
        self.matcher = matcher  # of the structure that it must have, if any
        self.saved: Saved | None = None
        self.scored: list[Logprob] = []  # of its prompt, from the second token on, as far as computed
        self.finish: Finish | None = None
        self.error = admission.error  # why it cannot be run
        self._stops, self._eos_ids = stops, eos_ids
        self._max_tokens = min(self.limits.max_tokens, context_tokens - self.prompt_len)

    @property
    def output_tokens(self) -> int:
        return max(len(self.tokens) - self.prompt_len, 0)

    @property
    def ready(self) -> bool:
        """Whether a step with it would not wait for its grammar."""
        return self.matcher is None or self.matcher.ready

    @property
    def remaining_tokens(self) -> int:
        """How many tokens it may still emit."""
        return self._max_tokens - self.output_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens that must be computed before it can draft: all of the prompt, but not the last token of output."""
        computed = self.saved.length if self.saved else self.kv.length
        return max(len(self.tokens) - computed - (1 if self.output_tokens else 0), 0)

    @property
    def scores(self) -> bool:
        """Whether it is still to tell its prompt's log-probabilities. It then computes KV of no token without them."""
        return self.sampling.prompt_logprobs is not None and not self.output_tokens

    def to_score(self, stop: int) -> int:
        """Of how many tokens of the prompt a pass up to position `stop` is to tell the log-probability."""
        return max(min(stop, self.prompt_len - 1) - len(self.scored), 0) if self.scores else 0

    def runnable(self, prefill_tokens: int) -> bool:
        """Whether a step could do something for it, if that may prefill so many of its tokens."""
        return self.finish is None and (bool(self.error) or not self.num_uncomputed or prefill_tokens > 0)

    def keep(self, known: "EngineRequest") -> None:
        """Take over the KV of the same request as it was `known` before, as far as its tokens are the same."""
        pairs = zip(known.tokens, self.tokens, strict=False)
        agreed = next((i for i, (before, now) in enumerate(pairs) if before != now), len(self.tokens))
        agreed = max(min(agreed, len(self.tokens) - 1), 0)
        if self.scores:
            if known.sampling.prompt_logprobs == self.sampling.prompt_logprobs:
                self.scored = known.scored[: max(agreed - 1, 0)]
            agreed = min(agreed, len(self.scored))
        self.kv, self.saved = known.kv, known.saved
        self.kv.truncate(agreed)
        if self.saved:
            self.saved.length = min(self.saved.length, agreed)

    def extend(self, sampled: Sequence[int]) -> list[int]:
        """Append sampled tokens up to the one that ends the request. Returns those, and sets `finish`."""
        emitted: list[int] = []
        for token in sampled:
            self.tokens.append(token)
            emitted.append(token)
            self.finish = self._ending(token)
            if self.finish is not None:
                break
        return emitted

    def _ending(self, token: int) -> Finish | None:
        stopped = self._stops.push(token)  # always: it must see every token
        complete = self.matcher is not None and self.matcher.push(token)
        if complete or (token in self._eos_ids and not self.limits.ignore_eos):
            return Finish.STOP
        if stopped and self.output_tokens >= self.limits.min_tokens:
            return Finish.STOP
        return Finish.LENGTH if self.remaining_tokens <= 0 else None

    def row(self, start: int, **fields: Any) -> Row:
        """The report of a round that began at output token `start`; `fields` are what else the round did."""
        return Row(
            self.id,
            self.placement,
            start,
            blocks=self.kv.private_blocks,
            num_uncomputed=0 if self.finish else self.num_uncomputed,
            finish=self.finish,
            error=self.error,
            **fields,
        )

    def held(self) -> Held:
        """How much of its KV there is."""
        return Held(
            self.id,
            self.placement,
            self.output_tokens,
            blocks=self.kv.private_blocks,
            offloaded=self.saved.blocks if self.saved else 0,
            num_uncomputed=self.num_uncomputed,
        )
