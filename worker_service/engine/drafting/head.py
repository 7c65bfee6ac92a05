"""The draft head: a small network that continues from the target's hidden state. Training it is distill's business.

It is a recurrence without attention, after Hydra (Ankner et al., 2024, arXiv 2402.05109) and ReDrafter (Zhang et al.,
2024, arXiv 2403.09919): from a state and the embedding of the newest token it makes the next state, and from that the
next draft. The first state is the target's hidden state, which has seen the whole text. So a draft head has no KV:
nothing to keep in blocks, to offload or to compute again.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn.functional import rms_norm, silu

from worker_service.engine.weights_file import save_weights

CONFIG, WEIGHTS = "head.json", "head.safetensors"


@dataclass(frozen=True, slots=True)
class DraftHeadConfig:
    """What head.json holds."""

    target: str  # name of the model that it was made for
    vocabulary: str  # digest of the target's tokens
    hidden_size: int
    intermediate_size: int
    draft_tokens: int  # how many tokens it can propose: those that the target uses most


class DraftHead(torch.nn.Module):
    """One step of the recurrence: from a state and a token to the next state.

    The embeddings of tokens, and the output rows that make logits of a state, are the target's. They are not among the
    head's own weights.
    """

    EPSILON = 1e-5  # of its norms
    draft_ids: torch.Tensor  # [draft_tokens]: the target's id of each draft token

    def __init__(self, config: DraftHeadConfig) -> None:
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
        """The next state [n, hidden], from `state` [n, hidden] and the newest tokens' embeddings `token` [n, hidden].

        `state` is the target's hidden state, or what the last call returned.
        """
        joined = self.join(torch.cat([_norm(state, self.state_norm), _norm(token, self.token_norm)], -1))
        gate, up = self.gate_up(_norm(joined, self.mlp_norm)).chunk(2, -1)
        result: torch.Tensor = joined + self.down(silu(gate) * up)
        return result

    def output(self, state: torch.Tensor) -> torch.Tensor:
        """What the target's output rows of the draft tokens are multiplied with, for logits [n, hidden]."""
        return _norm(state, self.output_norm)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rms_norm(x.to(weight.dtype), weight.shape, weight, DraftHead.EPSILON)


def save_head(head: DraftHead, folder: Path) -> None:
    """Into `folder`, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(asdict(head.config), indent=2) + "\n")
    weights = {name: weight.to(torch.bfloat16) for name, weight in head.named_parameters()}
    save_weights(weights | {"draft_ids": head.draft_ids.to(torch.int32)}, folder / WEIGHTS)


def load_head(folder: Path) -> DraftHead:
    """Raises ValueError or OSError, with a message for people."""
    try:
        head = DraftHead(DraftHeadConfig(**json.loads((folder / CONFIG).read_text())))
        head.load_state_dict(load_file(folder / WEIGHTS))
    except (TypeError, RuntimeError, SafetensorError) as error:
        told = " ".join(str(error).split())  # torch lists tensors on lines of their own
        raise ValueError(f"it is no draft head of this version: {told}") from error
    return head
