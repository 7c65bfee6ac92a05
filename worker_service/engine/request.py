"""One request inside the engine: its tokens, its KV, and when it ends. Which requests run is not decided here."""

from collections.abc import Sequence
from dataclasses import dataclass

from worker_service.engine.kv import KV
from worker_service.engine.stop import StopStrings
from worker_service.engine.types import Finish, Limits, Sampling


@dataclass(slots=True)
class Saved:
    """KV in the host's memory, with the target: `blocks` of it, good for the first `length` tokens."""

    blocks: int
    length: int


class EngineRequest:
    """Tokens are the truth; `kv` holds the first `kv.length` of them, never the last one. It is empty while there is
    `saved` KV."""

    def __init__(
        self,
        request_id: str,
        placement: int,
        tokens: Sequence[int],
        prompt_len: int,
        sampling: Sampling,
        limits: Limits,
        *,
        salt: str,
        kv: KV,
        stops: StopStrings,
        eos_ids: frozenset[int],
        context_tokens: int,
    ) -> None:
        self.id, self.placement = request_id, placement
        self.tokens = list(tokens)
        self.prompt_len = prompt_len
        self.sampling, self.limits = sampling, limits
        self.salt, self.kv = salt, kv
        self.saved: Saved | None = None
        self.finish: Finish | None = None
        self.error = ""
        self._stops, self._eos_ids = stops, eos_ids
        self._max_tokens = min(limits.max_tokens, context_tokens - prompt_len)

    @property
    def output_tokens(self) -> int:
        return max(len(self.tokens) - self.prompt_len, 0)

    @property
    def left(self) -> int:
        """How many tokens it may still emit."""
        return self._max_tokens - self.output_tokens

    @property
    def prefill_owed(self) -> int:
        """Tokens to be computed before it can draft: all of the prompt, but not the last token of output."""
        computed = self.saved.length if self.saved else self.kv.length
        return len(self.tokens) - computed - (1 if self.output_tokens else 0)

    def extend(self, sampled: Sequence[int]) -> list[int]:
        """Append sampled tokens up to the one that ends the request; returns those, and sets `finish`."""
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
        if token in self._eos_ids and not self.limits.ignore_eos:
            return Finish.STOP
        if stopped and self.output_tokens >= self.limits.min_tokens:
            return Finish.STOP
        return Finish.LENGTH if self.left <= 0 else None
