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
from safetensors.torch import load_file

from worker_service.engine.types import Remaining, Row
from worker_service.engine.upload import sent_together
from worker_service.engine.weights_file import save_weights

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
    """Reads the rows of a step that are due, and follows all of them, in as many operations however many they are. What
    it keeps of a request is a cache: after a move it takes the mean of what came since."""

    def __init__(self, head: LengthHead, device: torch.device) -> None:
        self._head = head.to(device).requires_grad_(False)
        self._every = head.config.every
        self._kept: OrderedDict[str, tuple[int, int]] = OrderedDict()  # of a request: its row of `_means`, states seen
        self._means = torch.zeros(0, head.config.hidden_size, device=device)
        self._vacant: list[int] = []  # rows of `_means`

    def told(self, rows: Sequence[Row], begins: Sequence[int], hidden: torch.Tensor) -> list[Row]:
        """The rows, with a reading where one is due: at the first token, and when `every` more have come since.

        `hidden` [num_logits of all rows, hidden size]; those of row i begin at `begins[i]`.
        """
        running: list[int] = []
        for i, row in enumerate(rows):
            if row.finish is not None:
                self.forget(row.request_id)
            elif row.tokens:
                running.append(i)
        if not running:
            return list(rows)
        due = [(place, i) for place, i in enumerate(running) if self._due(rows[i])]
        places, newest, first, *others = sent_together(
            [
                [place for place, _ in due],
                [begins[i] + len(rows[i].tokens) - 1 for _, i in due],
                [rows[i].start == 0 for _, i in due],
                *self._joined([rows[i] for i in running], [begins[i] for i in running]),
            ],
            hidden.device,
        )
        means = self._follow(hidden, *others)
        told = list(rows)
        if due:
            logs = self._head(hidden[newest].float(), means[places], first.bool())
            quantised = (-16 * logs).round().clamp(0, 255).to(torch.uint8).tolist()
            for (_, i), chances in zip(due, quantised, strict=True):
                told[i] = replace(rows[i], remaining=Remaining(rows[i].start + len(rows[i].tokens), bytes(chances)))
        return told

    def _due(self, row: Row) -> bool:
        return row.start == 0 or row.start // self._every != (row.start + len(row.tokens)) // self._every

    def _joined(self, rows: Sequence[Row], begins: Sequence[int]) -> Sequence[list[int]]:
        """What `_follow` is to know: of each new state where it is, and whose; of each row, where its mean is kept, how
        many states are new, and in how many of the last ones they count."""
        states: list[int] = []
        owners: list[int] = []
        kept, counts, within = [], [], []
        for owner, (row, begin) in enumerate(zip(rows, begins, strict=True)):
            place, seen = self._place(row)
            count = len(row.tokens)
            self._kept[row.request_id] = place, seen + count
            states += range(begin, begin + count)
            owners += [owner] * count
            kept.append(place)
            counts.append(count)
            within.append(min(seen + count, WINDOW))
        return states, owners, kept, counts, within

    def _follow(
        self,
        hidden: torch.Tensor,
        states: torch.Tensor,
        owners: torch.Tensor,
        kept: torch.Tensor,
        counts: torch.Tensor,
        within: torch.Tensor,
    ) -> torch.Tensor:
        """The means [rows, hidden size] once these states have come."""
        fresh = torch.zeros(len(kept), hidden.shape[1], device=hidden.device)
        fresh = fresh.index_add_(0, owners, hidden[states].float()) / counts[:, None]
        share = (counts / within).clamp(max=1)[:, None]
        means = torch.where(share == 1, fresh, self._means[kept].lerp(fresh, share))
        self._means[kept] = means
        return means

    def _place(self, row: Row) -> tuple[int, int]:
        """Its row of `_means`, and how many states are in there. It is the newest one now."""
        if (kept := self._kept.pop(row.request_id, None)) is not None:
            return kept if row.start else (kept[0], 0)
        if len(self._kept) >= MOST:
            self.forget(next(iter(self._kept)))
        if not self._vacant:
            size, width = self._means.shape
            more = torch.zeros(max(8, size), width, device=self._means.device)
            self._means = torch.cat([self._means, more])
            self._vacant = list(reversed(range(size, len(self._means))))
        return self._vacant.pop(), 0

    def forget(self, id: str) -> None:
        """It goes on elsewhere, or nobody wants it. Unknown ids are no error."""
        if (kept := self._kept.pop(id, None)) is not None:
            self._vacant.append(kept[0])


def save_length_head(head: LengthHead, folder: Path) -> None:
    """Into `folder`, in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(asdict(head.config), indent=2) + "\n")
    save_weights({name: weight.half() for name, weight in head.state_dict().items()}, folder / WEIGHTS)


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
        told = " ".join(str(error).split())  # torch lists tensors on lines of their own
        raise ValueError(f"it is no probe of this version: {told}") from error
    return head
