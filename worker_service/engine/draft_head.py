"""The drafter that is a head on the target: it reads the target's hidden state. Training it is distill's business.

A recurrence without attention, after Hydra (Ankner et al., 2024, arXiv 2402.05109) and ReDrafter (Zhang et al., 2024,
arXiv 2403.09919): from a state and the embedding of the newest token it makes the next state, and from that the next
draft. The first state is the target's hidden state, which has seen the whole text. So it has no KV: nothing to page, to
offload or to recompute; one vector is all it remembers of a request.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn.functional import rms_norm, silu

from worker_service.engine.draft import Ask
from worker_service.engine.draft_chain import Chain, NativeChain, TorchChain

# Chosen by replaying held-out answers with the costs of a small machine: higher only pays in larger batches.
SURE, HOPEFUL = 0.3, 0.5
CONFIG, WEIGHTS = "head.json", "head.safetensors"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    target: str  # name of the model that it was made for
    vocabulary: str  # digest of the target's tokens
    hidden_size: int
    intermediate_size: int
    draft_tokens: int  # how many tokens it can propose: those that the target uses most


def save_head(head: "Head", folder: Path) -> None:
    """Into `folder`, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(asdict(head.config), indent=2) + "\n")
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in head.named_parameters()}
    save_file(weights | {"draft_ids": head.draft_ids.to(torch.int32)}, folder / WEIGHTS)


def load_head(folder: Path) -> "Head":
    """Raises ValueError or OSError, with a message for people."""
    try:
        config = HeadConfig(**json.loads((folder / CONFIG).read_text()))
        head = Head(config)
        weights = load_file(folder / WEIGHTS)
        head.load_state_dict(weights)
    except (TypeError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{folder} is no draft head of this version: {error}") from error
    return head


class Head(torch.nn.Module):
    """One step: state and token -> next state. Embeddings and output rows are the target's, not among its weights."""

    EPSILON = 1e-5  # of its norms
    draft_ids: torch.Tensor  # [draft_tokens]: the target's id of each draft token

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        d, inner = config.hidden_size, config.intermediate_size
        self.config = config
        self.join = torch.nn.Linear(2 * d, d, bias=False)
        self.gate_up = torch.nn.Linear(d, 2 * inner, bias=False)
        self.down = torch.nn.Linear(inner, d, bias=False)
        self.state_norm, self.token_norm, self.mlp_norm, self.output_norm = (
            torch.nn.Parameter(torch.ones(d)) for _ in range(4)
        )
        self.register_buffer("draft_ids", torch.zeros(config.draft_tokens, dtype=torch.long))

    def forward(self, state: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """`state`: the target's hidden state or the last result; `token`: the newest one's embedding. [n, hidden]."""
        joined = self.join(torch.cat([_norm(state, self.state_norm), _norm(token, self.token_norm)], -1))
        gate, up = self.gate_up(_norm(joined, self.mlp_norm)).chunk(2, -1)
        result: torch.Tensor = joined + self.down(silu(gate) * up)
        return result

    def output(self, state: torch.Tensor) -> torch.Tensor:
        """What the target's output rows of the draft tokens are multiplied with, for logits."""
        return _norm(state, self.output_norm)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rms_norm(x.to(weight.dtype), weight.shape, weight, Head.EPSILON)


class HeadDrafter:
    """Drafts greedily, the whole batch one token at a time, for as long as it is sure enough.

    A request of which it holds no state drafts nothing: the next round brings one.
    """

    def __init__(
        self,
        head: Head,
        embeddings: torch.Tensor,
        output_rows: torch.Tensor,
        sure: float = SURE,
        hopeful: float = HOPEFUL,
    ) -> None:
        """`embeddings`, `output_rows`: the target's, [vocabulary, hidden]; it works on a copy of the head in
        their dtype, on their device.

        A draft is proposed if it and all before it are right with probability `sure` by the head's own reckoning; and
        another one is made if that of some request so far is `hopeful`: else its work would likely be for nothing.
        Raises ValueError if the head's tokens are not among the target's.
        """
        if not all(0 <= token < len(embeddings) for token in head.draft_ids.tolist()):
            raise ValueError(f"its tokens are not among the {len(embeddings)} of the target")
        head = copy.deepcopy(head).to(embeddings.device, embeddings.dtype).requires_grad_(False)
        kind = NativeChain if NativeChain.supports(head, embeddings) else TorchChain
        self._chains: Chain = kind(head, embeddings, output_rows[head.draft_ids].to(embeddings.dtype))
        self._sure, self._hopeful = sure, hopeful
        self._hidden = embeddings.new_ones(1, embeddings.shape[1])  # for rehearsals
        self._states: dict[str, tuple[int, torch.Tensor]] = {}  # how many tokens it has seen, and its hidden state

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        known = [ask for ask in asks if self._states.get(ask.request_id, (0,))[0] == len(ask.tokens)]
        if not known:
            return [[] for _ in asks]
        hidden = torch.stack([self._states[ask.request_id][1] for ask in known])
        longest = max(ask.draft_len for ask in known)
        chains = self._chains(hidden, [ask.tokens[-1] for ask in known], longest, self._sure, self._hopeful)
        drafts = dict(zip([ask.request_id for ask in known], chains, strict=True))
        return [drafts.get(ask.request_id, [])[: ask.draft_len] for ask in asks]

    def observe(self, request_id: str, length: int, hidden: torch.Tensor) -> None:
        self._states[request_id] = length, hidden.clone()  # a row: what it is a view of is the whole round's

    def rehearse(self, batch: int, draft_len: int) -> None:
        self._chains(self._hidden.expand(batch, -1), [0] * batch, draft_len, sure=0.0, hopeful=0.0)

    def forget(self, request_id: str) -> None:
        self._states.pop(request_id, None)
