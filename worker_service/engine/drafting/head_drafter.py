"""The drafter that is a draft head on the target: it continues from what the target knew of each request."""

import copy
from collections.abc import Sequence

import torch

from worker_service.engine.drafting.chain import NativeRecurrence, Recurrence, TorchRecurrence
from worker_service.engine.drafting.drafter import ALL, USUAL, Ask, Drafter, Price, Verified
from worker_service.engine.drafting.head import DraftHead


class HeadDrafter(Drafter):
    """Drafts greedily, from each of the likeliest next tokens, for the whole batch and for as long as one more may pay.

    For a request whose newest hidden state it does not have it drafts nothing: the next round brings one.
    """

    def __init__(
        self,
        head: DraftHead,
        embeddings: torch.Tensor,
        output_rows: torch.Tensor,
        price: Price = USUAL,
    ) -> None:
        """`embeddings`, `output_rows`: the target's, [vocabulary, hidden]. The drafter works on a copy of the head, on
        their device.

        `price`: what its drafts must bring, until another one is told. Chances are the head's own reckoning. Raises
        ValueError if the head's tokens are not among the target's.
        """
        count = len(embeddings)
        if not all(0 <= token < count for token in head.draft_ids.tolist()):
            raise ValueError(f"its tokens are not among the {count} of the target")
        head = copy.deepcopy(head).to(embeddings.device, embeddings.dtype).requires_grad_(False)
        kind = NativeRecurrence if NativeRecurrence.supports(head, embeddings) else TorchRecurrence
        self._draft: Recurrence = kind(head, embeddings, output_rows[head.draft_ids].to(embeddings.dtype))
        self._price = price
        self._hidden = embeddings.new_ones(1, embeddings.shape[1])  # for rehearsals
        self._states: dict[str, tuple[int, torch.Tensor]] = {}  # of each request: tokens seen, hidden state after them

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        known = [ask for ask in asks if self._states.get(ask.request_id, (0,))[0] == len(ask.tokens)]
        self.chances, self.others, self.positions = (), (), 0
        if not known:
            return [[] for _ in asks]
        hidden = torch.stack([self._states[ask.request_id][1] for ask in known])
        longest = max(ask.draft_len for ask in known)
        width = max(ask.chains for ask in known)
        chains, self.positions = self._draft(hidden, [ask.tokens[-1] for ask in known], width, longest, self._price)
        found = dict(zip([ask.request_id for ask in known], chains, strict=True))
        drafts = [[own[: ask.draft_len] for own in found.get(ask.request_id, [[]])[: ask.chains]] for ask in asks]
        self.others = [[own for own in others if own] for _, *others in drafts]
        self.chances = [[chance for _, chance in own] for own, *_ in drafts]
        return [[token for token, _ in own] for own, *_ in drafts]

    def verified(self, rounds: Sequence[Verified]) -> None:
        for request_id, tokens, hidden, _ in rounds:
            self._states[request_id] = len(tokens), hidden.clone()  # one row: the tensor behind it is the whole step's

    def price(self, price: Price) -> None:
        self._price = price

    def rehearse(self, batch: int, draft_len: int) -> None:
        self._draft(self._hidden.expand(batch, -1), [0] * batch, 1, draft_len, ALL)

    def forget(self, request_id: str) -> None:
        self._states.pop(request_id, None)
