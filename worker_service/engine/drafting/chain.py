"""How the draft head's recurrence is computed: natively on a CPU, with torch elsewhere. It knows no requests."""

import ctypes
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

import torch
from torch.nn.functional import embedding, linear

from worker_service.engine import native
from worker_service.engine.drafting.drafter import Price
from worker_service.engine.drafting.head import DraftHead
from worker_service.engine.packed import pack
from worker_service.engine.upload import sent


class Chain(Protocol):
    """Drafts greedily, one token at a time for the whole batch."""

    def __call__(
        self, state: torch.Tensor, tokens: Sequence[int], longest: int, price: Price
    ) -> tuple[list[list[tuple[int, float]]], int]:
        """For each row of `state` [n, hidden] and its newest token in `tokens` [n] at most `longest` drafts, each with
        the chance that it and all before it are right; and for how many positions drafts were computed.

        Only those that may be worth it are returned, and the chain ends once no further one is.
        """


class TorchChain:
    """With torch's own operations, on any device."""

    def __init__(self, head: DraftHead, embeddings: torch.Tensor, output: torch.Tensor) -> None:
        """`output` [draft tokens, hidden]: the target's output rows of the head's draft tokens."""
        self._head, self._embeddings, self._output = head, embeddings, output

    def __call__(
        self, state: torch.Tensor, tokens: Sequence[int], longest: int, price: Price
    ) -> tuple[list[list[tuple[int, float]]], int]:
        token = sent(torch.tensor(tokens), state.device)
        chance = torch.ones(len(tokens), dtype=torch.float32, device=state.device)
        drafts: list[list[tuple[int, float]]] = [[] for _ in tokens]
        positions = 0
        while positions < longest:
            positions += 1
            state = self._head(state, embedding(token, self._embeddings))
            logits = linear(self._head.output(state), self._output).float()
            best, index = logits.max(-1)
            chance = chance * (best - logits.logsumexp(-1)).exp()
            token = self._head.draft_ids[index]
            chances, found = torch.stack([chance.double(), token.double()]).tolist()  # one wait for both
            for own, draft, value in zip(drafts, found, chances, strict=True):
                if value >= price.least:
                    own.append((int(draft), value))
            if not price.goes_on(chances):
                break
        return drafts, positions


class _DraftHead(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("hidden", "inner", "outputs")),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("join", "gate_up", "down", "output", "embeddings")),
        *((name, ctypes.c_void_p) for name in ("state_norm", "token_norm", "mlp_norm", "output_norm")),
        ("ids", ctypes.c_void_p),
    ]


class NativeChain:
    """kernels/draft_head.h: one call for a whole chain. Between layers nothing is rounded to bfloat16."""

    @staticmethod
    def supports(head: DraftHead, embeddings: torch.Tensor) -> bool:
        config = head.config
        sizes = config.hidden_size, 2 * config.intermediate_size, config.draft_tokens
        fits = all(size % native.PANEL == 0 for size in sizes) and embeddings.device.type == "cpu"
        return fits and embeddings.dtype in native.TYPES and native.kernels() is not None

    def __init__(self, head: DraftHead, embeddings: torch.Tensor, output: torch.Tensor) -> None:
        config, dtype = head.config, embeddings.dtype
        products = [pack(weight) for weight in (head.join.weight, head.gate_up.weight, head.down.weight, output)]
        norms = [norm.float() for norm in (head.state_norm, head.token_norm, head.mlp_norm, head.output_norm)]
        self._kept = [*products, embeddings.contiguous(), *norms, head.draft_ids.to(torch.int32)]
        sizes = config.hidden_size, config.intermediate_size, config.draft_tokens
        self._head = _DraftHead(*sizes, head.EPSILON, *(tensor.data_ptr() for tensor in self._kept))
        pointer, integer, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
        self._kernel = native.function(
            "draft", dtype, pointer, pointer, pointer, integer, integer, number, number, pointer, pointer, pointer
        )

    def __call__(
        self, state: torch.Tensor, tokens: Sequence[int], longest: int, price: Price
    ) -> tuple[list[list[tuple[int, float]]], int]:
        n, state = len(tokens), state.to(torch.float32, copy=True)
        token, drafts, lengths = (torch.empty(size, dtype=torch.int32) for size in (n, (n, longest), n + 1))
        token.copy_(torch.tensor(tokens))
        chances = torch.empty((n, longest))
        outputs = drafts.data_ptr(), chances.data_ptr(), lengths.data_ptr()
        self._kernel(ctypes.byref(self._head), state.data_ptr(), token.data_ptr(), n, longest, *price, *outputs)
        pairs = map(zip, drafts.tolist(), chances.tolist())
        *count, positions = lengths.tolist()
        return [list(islice(own, length)) for own, length in zip(pairs, count, strict=True)], positions
