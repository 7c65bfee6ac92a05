"""What is told of a prompt: the log-probabilities of its tokens, gathered over the passes of its prefill, and its
embedding. Nothing is drawn here."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.functional import normalize

from worker_service.engine.planning import Work
from worker_service.engine.request import EngineRequest
from worker_service.engine.sampling import logprobs
from worker_service.engine.target import Passed
from worker_service.engine.types import Row


def scored(works: Sequence[Work], passed: Passed) -> Passed:
    """Keep with each request what its rows tell of the prompt. What is left in `passed` are the rows to draw from:
    num_logits of each of the works, and those of their branches."""
    if not any(work.scored for work in works):
        return passed
    rows: list[int] = []
    begin = 0
    for work in works:
        end = begin + work.scored
        _score(work.request, passed.logits[begin:end])
        begin = end + work.num_logits
        rows.extend(range(end, begin))
    rows.extend(range(begin, len(passed.logits)))
    drawn = torch.tensor(rows, dtype=torch.long, device=passed.logits.device)
    return passed._replace(logits=passed.logits[drawn], hidden=passed.hidden[drawn])


def _score(request: EngineRequest, logits: torch.Tensor) -> None:
    """`logits` [n, vocabulary]: those of the next n tokens of the prompt that are not scored yet."""
    if len(logits):
        first = len(request.scored) + 1
        tokens = request.tokens[first : first + len(logits)]
        request.scored += logprobs(logits.log_softmax(-1), tokens, request.sampling.prompt_logprobs or 0)


def with_prompt(row: Row, request: EngineRequest, hidden: torch.Tensor, begin: int) -> Row:
    """The row; if it has the output's first token, with what was asked of the prompt. `hidden` [n, hidden size]: what
    tokens were drawn from, the row's from `begin` on; the first of them after the whole prompt."""
    if row.start or not row.tokens:
        return row
    if request.sampling.embedding:
        row = replace(row, embedding=tuple(normalize(hidden[begin].float(), dim=0).tolist()))
    if request.sampling.prompt_logprobs is not None:
        row, request.scored = replace(row, prompt_logprobs=tuple(request.scored)), []
    return row
