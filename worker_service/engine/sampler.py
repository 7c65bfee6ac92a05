"""The draws of a step: what is kept of each request's drafts, and the target's own token after them.

On a device all rows of all requests are drawn at once, and one copy to the host says everything. A CPU gains nothing by
that: there rows go one at a time, so that those behind a rejected draft, which is most of them, cost nothing.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from worker_service.engine import hooks
from worker_service.engine.hooks import LogitsContext, LogitsHook
from worker_service.engine.sampling import agreed, argmax, argmax_rows, draw, draw_rows, logprobs
from worker_service.engine.types import Logprob, Sampling
from worker_service.engine.upload import sent

_AT_ONCE = 1 << 24  # logits whose distributions are computed together: they take some 30 bytes each


class Drawn(NamedTuple):
    """Of one request: the drafts that equal what the target draws, and then one token of the target's own. Drawing ends
    before logits that are no distribution, so there may be no token at all."""

    tokens: Sequence[int] = ()
    logprobs: tuple[Logprob, ...] = ()  # one a token, where they are asked for


class Sampler:
    """Applies the hooks to what they concern, and draws."""

    def __init__(self, hooks: Sequence[LogitsHook]) -> None:
        self._hooks = tuple(hooks)

    def draw(self, logits: torch.Tensor, asked: Sequence[LogitsContext]) -> list[Drawn]:
        """For each request of a step. `logits`: float32 [rows, vocabulary], written to; of each request one row after
        none of its drafts, one after the first, and so on."""
        ends = accumulate(len(each.drafts) + 1 for each in asked)
        parts = [slice(end - len(each.drafts) - 1, end) for each, end in zip(asked, ends, strict=True)]
        if logits.device.type == "cpu":
            return [self._alone(logits[part], each) for part, each in zip(parts, asked, strict=True)]
        return self._together(logits, asked, parts) if asked else []

    def _alone(self, logits: torch.Tensor, asked: LogitsContext) -> Drawn:
        own, plain = asked.sampling, self._plain(asked)
        if plain and own.temperature == 0:
            tokens = agreed(argmax(logits), asked.drafts)
            raw = [] if own.logprobs is None else [logits[: len(tokens)].log_softmax(-1)]
        else:
            raw = []
            tokens = agreed(self._one_by_one(logits, asked, plain, raw), asked.drafts)
        return Drawn(tokens, logprobs(torch.cat(raw), tokens, own.logprobs or 0) if raw else ())

    def _one_by_one(
        self, logits: torch.Tensor, asked: LogitsContext, plain: bool, raw: list[torch.Tensor]
    ) -> Iterator[int | None]:
        own = asked.sampling
        for j in range(len(logits)):
            row = logits[j : j + 1]
            if own.logprobs is not None:
                raw.append(row.log_softmax(-1))  # before the hooks, which may write into the logits
            if plain:
                yield _token(row, own, asked.start + j)
            else:
                yield self._hooked_token(row, asked.row(j), asked.start + j)

    def _hooked_token(self, row: torch.Tensor, asked: LogitsContext, position: int) -> int | None:
        """`asked`: of this row alone. Where only a mask counts little of the row may have to be read or written."""
        own, mask = asked.sampling, asked.allowed
        if mask is not None and self._hooks == hooks.HOOKS and hooks.only_masked(asked):
            if asked.few and (few := asked.few[0]) is not None:
                chosen = _token(row[:, few], own, position) if len(few) else None
                return None if chosen is None else int(few[chosen])
            if own.temperature == 0 and (best := argmax(row)[0]) is not None and hooks.is_allowed(mask[0], best):
                return best
        return _token(self._hooked(row, asked), own, position)

    def _together(self, logits: torch.Tensor, asked: Sequence[LogitsContext], parts: Sequence[slice]) -> list[Drawn]:
        telling = [(part, each) for part, each in zip(parts, asked, strict=True) if each.sampling.logprobs is not None]
        told = [row for part, _ in telling for row in range(part.start, part.stop)]
        rows = sent(torch.tensor(told, dtype=torch.long), logits.device) if told else None
        raw = None if rows is None else logits[rows].log_softmax(-1)  # before the hooks
        for part, each in zip(parts, asked, strict=True):
            if not self._plain(each):
                own = logits[part]
                if (hooked := self._hooked(own, each)) is not own:
                    own.copy_(hooked)
        tokens = _tokens(logits, asked)
        if raw is None:
            said = tokens.tolist()
            return [Drawn(agreed(said[part], each.drafts)) for part, each in zip(parts, asked, strict=True)]
        best = raw.topk(min(max(each.sampling.logprobs or 0 for _, each in telling), raw.shape[1]))
        own = raw.gather(-1, tokens[rows].clamp(0)[:, None])
        numbers = torch.cat([tokens.double(), torch.cat([own, best.values, best.indices.double()], -1).flatten()])
        found = numbers.cpu().numpy()  # ids and float32 numbers, all exact in float64
        said, about = found[: len(tokens)].astype(int).tolist(), found[len(tokens) :].reshape(len(told), -1)
        by_row = dict(zip(told, map(_logprob, about.tolist()), strict=True))
        drawn = []
        for part, each in zip(parts, asked, strict=True):
            kept, alternatives = agreed(said[part], each.drafts), each.sampling.logprobs
            known = [by_row[row] for row in range(part.start, part.start + len(kept)) if row in by_row]
            drawn.append(Drawn(kept, tuple(Logprob(each.logprob, each.top[:alternatives]) for each in known)))
        return drawn

    def _plain(self, asked: LogitsContext) -> bool:
        """Whether no hook has anything to do. What others than ours do is not known."""
        return self._hooks == hooks.HOOKS and hooks.untouched(asked)

    def _hooked(self, logits: torch.Tensor, context: LogitsContext) -> torch.Tensor:
        for hook in self._hooks:
            logits = hook(logits, context)
        return logits


def _token(row: torch.Tensor, own: Sampling, position: int) -> int | None:
    """Of logits [1, vocabulary] on a CPU; None: they are no distribution."""
    return argmax(row)[0] if own.temperature == 0 else draw(row[0], own, position)


def _tokens(logits: torch.Tensor, asked: Sequence[LogitsContext]) -> torch.Tensor:
    """int64 [rows]; -1 where the logits are no distribution."""
    rows = [(each.sampling, each.start + j) for each in asked for j in range(len(each.drafts) + 1)]
    drawn = [i for i, (own, _) in enumerate(rows) if own.temperature > 0]
    tokens = argmax_rows(logits)
    if drawn:
        size = max(_AT_ONCE // logits.shape[1], 1)
        places = sent(torch.tensor(drawn), logits.device)
        for begin in range(0, len(drawn), size):
            some = [rows[i] for i in drawn[begin : begin + size]]
            own = places[begin : begin + size]
            tokens[own] = draw_rows(logits[own], *zip(*some, strict=True))
    return tokens


def _logprob(numbers: Sequence[float]) -> Logprob:
    """From a token's, those of the likeliest, and which these are."""
    own, *others = numbers
    n = len(others) // 2
    return Logprob(own, tuple(zip(map(int, others[n:]), others[:n], strict=True)))
