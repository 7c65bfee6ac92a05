"""How the draft head's recurrence is computed: natively on a CPU, with torch elsewhere. It knows no requests."""

import ctypes
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import embedding, linear

from worker_service.engine import native
from worker_service.engine.drafting.drafter import Chain, Price
from worker_service.engine.drafting.head import DraftHead
from worker_service.engine.few_bits import quantise
from worker_service.engine.packed import Matrix, Packed, gather
from worker_service.engine.upload import sent


class Chains(NamedTuple):
    """For each request some chains of drafts, ordered by how likely their first tokens are, the likeliest first. The
    chains of a request begin with different tokens, and any may be empty."""

    found: list[list[Chain]]
    positions: int  # for how many drafts were computed, one after the other


class Recurrence(Protocol):
    """Drafts one token at a time for the whole batch. Greedily, but for the first position."""

    def __call__(self, state: torch.Tensor, tokens: Sequence[int], width: int, longest: int, price: Price) -> Chains:
        """For each row of `state` [n, hidden] and its newest token in `tokens` [n] `width` chains of at most `longest`
        drafts, which begin with the likeliest tokens.

        Only drafts that may be worth it are returned, and the chains end once no further one is.
        """


class TorchRecurrence:
    """With torch's own operations, on any device."""

    def __init__(self, head: DraftHead, embeddings: torch.Tensor, output: torch.Tensor) -> None:
        """`output` [draft tokens, hidden]: the target's output rows of the head's draft tokens."""
        self._head, self._embeddings, self._output = head, embeddings, output

    def __call__(self, state: torch.Tensor, tokens: Sequence[int], width: int, longest: int, price: Price) -> Chains:
        token = sent(torch.tensor(tokens), state.device)
        chance = torch.ones(len(tokens), 1, dtype=torch.float32, device=state.device)
        chains: list[Chain] = [[] for _ in range(len(tokens) * width)]
        positions = 0
        while positions < longest:
            state = self._head(state, embedding(token, self._embeddings))
            logits = linear(self._head.output(state), self._output).float()
            best = logits.topk(1 if positions else width, -1)
            chance = (chance * (best.values - logits.logsumexp(-1, keepdim=True)).exp()).view(-1, 1)
            token = self._head.draft_ids[best.indices].flatten()
            if not positions:
                state = state.repeat_interleave(width, 0)
            positions += 1
            chances, found = torch.stack([chance[:, 0].double(), token.double()]).tolist()  # one wait for both
            for own, draft, value in zip(chains, found, chances, strict=True):
                if value >= price.least:
                    own.append((int(draft), value))
            if not price.goes_on(chances):
                break
        return Chains(_by_request(chains, width), positions)


def _by_request(chains: list[Chain], width: int) -> list[list[Chain]]:
    return [chains[i : i + width] for i in range(0, len(chains), width)]


def _packed(weight: torch.Tensor) -> Packed:
    """In 8 bits, if they can be, and if whole ones are not multiplied in tiles."""
    try:
        return Packed(weight.to(torch.bfloat16) if native.has_tiles() else quantise(weight, 8))
    except ValueError:  # no groups fit, or a weight is no number
        return Packed(weight.to(torch.bfloat16))


class _DraftHead(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("hidden", "inner", "outputs")),
        ("epsilon", ctypes.c_float),
        *((name, Matrix) for name in ("join", "gate_up", "down", "output")),
        *((name, ctypes.c_void_p) for name in ("embeddings", "state_norm", "token_norm", "mlp_norm", "output_norm")),
        ("ids", ctypes.c_void_p),
    ]


class NativeRecurrence:
    """kernels/draft_head.h: one call for whole chains. Weights are of 8 or 16 bits: drafts need not be exact."""

    @staticmethod
    def supports(head: DraftHead, embeddings: torch.Tensor) -> bool:
        config = head.config
        sizes = config.hidden_size, 2 * config.intermediate_size, config.draft_tokens
        fits = all(size % native.PANEL == 0 for size in sizes) and embeddings.device.type == "cpu"
        return fits and embeddings.dtype in native.TYPES and native.kernels() is not None

    def __init__(self, head: DraftHead, embeddings: torch.Tensor, output: torch.Tensor) -> None:
        config, weights = head.config, (head.join.weight, head.gate_up.weight, head.down.weight, output)
        self._products = [_packed(weight) for weight in weights]
        gather(self._products)
        norms = [norm.float() for norm in (head.state_norm, head.token_norm, head.mlp_norm, head.output_norm)]
        self._kept = [embeddings.contiguous(), *norms, head.draft_ids.to(torch.int32)]
        sizes = config.hidden_size, config.intermediate_size, config.draft_tokens
        pointers = [tensor.data_ptr() for tensor in self._kept]
        self._head = _DraftHead(*sizes, head.EPSILON, *(each.matrix for each in self._products), *pointers)
        pointer, integer, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
        self._kernel = native.function(
            "draft", embeddings.dtype, *[pointer] * 3, *[integer] * 3, number, number, *[pointer] * 3
        )

    def __call__(self, state: torch.Tensor, tokens: Sequence[int], width: int, longest: int, price: Price) -> Chains:
        n = len(tokens)
        states = torch.empty(n * width, state.shape[1])
        states[:n] = state
        token = torch.tensor(tokens, dtype=torch.int32)
        drafts, lengths = (torch.empty(size, dtype=torch.int32) for size in ((n * width, longest), n * width + 1))
        chances = torch.empty((n * width, longest))
        given = states.data_ptr(), token.data_ptr(), n, width, longest, *price
        self._kernel(ctypes.byref(self._head), *given, drafts.data_ptr(), chances.data_ptr(), lengths.data_ptr())
        pairs = map(zip, drafts.tolist(), chances.tolist())
        *count, positions = lengths.tolist()
        chains = [list(islice(own, length)) for own, length in zip(pairs, count, strict=True)]
        return Chains(_by_request(chains, width), positions)
