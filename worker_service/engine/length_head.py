"""The length head: what the target's hidden state tells of how much output remains. Training it is distill's business.

After TRAIL (Shahout et al., "Don't stop me now: embedding based scheduling for LLMs", arXiv 2410.01035): a small
classifier over bins of the remaining length. It is asked at the first token and every so many after it.
"""

import json
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from worker_service.engine.types import Remaining, Row

CONFIG, WEIGHTS = "probe.json", "probe.safetensors"
VERSION = 1  # of these files; another one is not read
BINS = 12  # bin k: at least 2**k output tokens remain, and fewer than 2**(k + 1); the last: any more


WINDOW = 64  # tokens: over so many of the last ones a mean is taken, but for older ones that fade
MOST = 4096  # requests whose mean is kept; the one that was longest without a step is forgotten first


@dataclass(frozen=True, slots=True)
class LengthHeadConfig:
    """What probe.json holds."""

    version: int
    target: str  # name of the model that it was made for
    fingerprint: str  # of that model
    hidden_size: int
    every: int  # tokens of output from one reading to the next


class LengthHead(torch.nn.Module):
    """From hidden states to bins: `first` from the one that the first token was chosen from, `later` from the newest
    one and the mean of the last ones."""

    def __init__(self, config: LengthHeadConfig) -> None:
        super().__init__()
        self.config = config
        self.first = torch.nn.Linear(config.hidden_size, BINS)
        self.later = torch.nn.Linear(2 * config.hidden_size, BINS)

    def forward(self, hidden: torch.Tensor, means: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [n, BINS]. `hidden`, `means`: float32 [n, hidden size]; `first` [n]: at the first token."""
        logits = torch.where(first[:, None], self.first(hidden), self.later(torch.cat([hidden, means], -1)))
        return logits.log_softmax(-1)


def middle(logs: torch.Tensor) -> torch.Tensor:
    """Mean [n] of ln(tokens that remain), from log-probabilities [n, BINS]."""
    centres = math.log(2) * (torch.arange(BINS, device=logs.device) + 0.5)
    return logs.exp() @ centres


def follow(mean: torch.Tensor, seen: int, rows: torch.Tensor) -> torch.Tensor:
    """The mean [hidden size] of `seen` states, once `rows` [n, hidden size] have come."""
    n = len(rows)
    return mean + (rows.mean(0) - mean) * min(1.0, n / min(seen + n, WINDOW))


class LengthProbe:
    """Reads the rows of a step that are due, all at once. What it keeps of a request is a cache: after a move it takes
    the mean of what came since."""

    def __init__(self, head: LengthHead, device: torch.device) -> None:
        self._head = head.to(device).requires_grad_(False)
        self._every = head.config.every
        self._means: OrderedDict[str, tuple[int, torch.Tensor]] = OrderedDict()  # states seen, and their mean

    def told(self, rows: Sequence[Row], begins: Sequence[int], hidden: torch.Tensor) -> list[Row]:
        """The rows, with a reading where one is due: at the first token, and when `every` more have come since.

        `hidden` [num_logits of all rows, hidden size]; those of row i begin at `begins[i]`.
        """
        due: list[int] = []
        newest: list[torch.Tensor] = []
        for i, (row, begin) in enumerate(zip(rows, begins, strict=True)):
            if row.finish is not None:
                self._means.pop(row.request_id, None)
            elif row.tokens:
                states = hidden[begin : begin + len(row.tokens)].float()
                self._follow(row.request_id, row.start, states)
                if row.start == 0 or row.start // self._every != (row.start + len(row.tokens)) // self._every:
                    due.append(i)
                    newest.append(states[-1])
        if not due:
            return list(rows)
        means = torch.stack([self._means[rows[i].request_id][1] for i in due])
        first = torch.tensor([rows[i].start == 0 for i in due], device=hidden.device)
        logs = self._head(torch.stack(newest), means, first)
        quantised = (-16 * logs).round().clamp(0, 255).to(torch.uint8).tolist()
        told = list(rows)
        for i, chances in zip(due, quantised, strict=True):
            told[i] = replace(rows[i], remaining=Remaining(rows[i].start + len(rows[i].tokens), bytes(chances)))
        return told

    def _follow(self, id: str, start: int, states: torch.Tensor) -> None:
        seen, mean = self._means.pop(id, (0, states[0])) if start else (0, states[0])
        self._means[id] = seen + len(states), follow(mean, seen, states)
        if len(self._means) > MOST:
            self._means.popitem(last=False)


def save_length_head(head: LengthHead, folder: Path) -> None:
    """Into `folder`, in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(asdict(head.config), indent=2) + "\n")
    save_file({name: weight.half().contiguous() for name, weight in head.state_dict().items()}, folder / WEIGHTS)


def load_length_head(folder: Path) -> LengthHead:
    """Raises ValueError or OSError, with a message for people."""
    try:
        config = LengthHeadConfig(**json.loads((folder / CONFIG).read_text()))
        if config.version != VERSION or config.every < 1:
            raise ValueError(f"version {config.version}, a reading every {config.every} tokens")
        head = LengthHead(config)
        head.load_state_dict(load_file(folder / WEIGHTS))
        if not all(bool(weight.isfinite().all()) for weight in head.state_dict().values()):
            raise ValueError("a weight is not finite")
    except (TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"it is no probe of this version: {error}") from error
    return head
