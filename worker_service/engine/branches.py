"""The branches of a step: drafts that begin with another token than the longest chain of drafts of their request. Where
they go in a pass, and what becomes of a branch that the target follows. What is drafted is not decided here.

Each branch is a text of its own to the pass, in blocks of its own from where it begins. So it is computed as if it were
the request's only text, to the bit.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from worker_service.engine.planning import Branch, Work
from worker_service.engine.sampler import Drawn
from worker_service.engine.target import InputSequence, Passed


def sprout(work: Work, chains: Sequence[Sequence[int]]) -> None:
    """Give the work these branches, as far as there are free blocks. Its KV is that of its drafts already."""
    for tokens in chains:
        fork = work.request.kv.fork(work.drafts_from, len(tokens))
        if fork is None:
            return
        work.branches.append(Branch(tokens, fork))


def sequences(works: Sequence[Work]) -> list[InputSequence]:
    """The target's input for all branches, which comes after that for the works themselves."""
    return [InputSequence(each.fork, work.drafts_from, each.tokens, 0) for work in works for each in work.branches]


def follow(
    works: Sequence[Work],
    drawn: Sequence[Drawn],
    passed: Passed,
    draw: Callable[[torch.Tensor, Sequence[tuple[Work, Branch]]], Sequence[Drawn]],
) -> list[Drawn]:
    """The draws of each of the works. If `drawn` has one token and that begins a branch, the target follows the branch:
    its own draws, which `draw` makes from the rows of the branch's logits, come behind that token. The branch's KV is
    then the request's, and in `passed` its hidden states and states take the places of those of the drafts."""
    found, followed = list(drawn), _followed(works, drawn)
    if not followed:
        return found
    rows = [row for each in followed for row in range(each.row, each.row + len(each.branch.tokens))]
    logits = passed.logits[torch.tensor(rows, device=passed.logits.device)]
    further = draw(logits, [(works[each.number], each.branch) for each in followed])
    for (number, branch, row, place, to_row, to_place), more in zip(followed, further, strict=True):
        if not more.tokens:
            continue  # no distribution: what follows the first token is computed anew, and then told
        own, n, kv = found[number], len(branch.tokens), works[number].request.kv
        found[number] = Drawn([*own.tokens, *more.tokens], own.logprobs + more.logprobs)
        passed.hidden[to_row : to_row + n] = passed.hidden[row : row + n]
        if passed.states is not None:
            passed.states[to_place : to_place + n] = passed.states[place : place + n]
        kv.merge(branch.fork, works[number].drafts_from + n)
        branch.followed = True
    return found


class _Followed(NamedTuple):
    """A branch that the target follows, of the work of this number. Where its first token is among the logits of a pass
    and among the tokens of it, and where the first draft is."""

    number: int
    branch: Branch
    row: int
    place: int
    draft_row: int
    draft_place: int


def _followed(works: Sequence[Work], drawn: Sequence[Drawn]) -> list[_Followed]:
    row, place = sum(work.num_logits for work in works), sum(len(work.sequence.tokens) for work in works)
    own_row = own_place = 0
    followed: list[_Followed] = []
    for number, (work, own) in enumerate(zip(works, drawn, strict=True)):
        draft_place = own_place + len(work.uncomputed)
        for branch in work.branches:
            if list(own.tokens) == [branch.tokens[0]]:
                followed.append(_Followed(number, branch, row, place, own_row + 1, draft_place))
            row, place = row + len(branch.tokens), place + len(branch.tokens)
        own_row, own_place = own_row + work.num_logits, draft_place + len(work.drafts)
    return followed


def prune(works: Sequence[Work]) -> None:
    """Give back the blocks of the branches that were not followed."""
    for work in works:
        for branch in work.branches:
            if not branch.followed:
                work.request.kv.abandon(branch.fork)
