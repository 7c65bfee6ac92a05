"""How a length head learns: from hidden states of the target's own answers to how many tokens were still to come.

Two linear classifiers over bins, each fitted to its end: the loss is convex, so nothing is left to chance. How much
they are held back is chosen by answers that each fit has not seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from worker_service.engine.length_head import BINS, LengthHead, middle

FOLDS = 5
SHRINKAGES = (1e-2, 3e-2, 1e-1, 3e-1, 1.0)  # of squared weights, beside the mean loss of an answer
STEPS = 60  # of L-BFGS, far more than it takes


class Examples(NamedTuple):
    """Positions in answers: `inputs` [n, size]; `left` [n], the tokens that were still to come, at least 1; `cut` [n],
    where a bound ended the answer, so that there would have been more; `answers` [n], which answer it is of."""

    inputs: torch.Tensor
    left: torch.Tensor
    cut: torch.Tensor
    answers: torch.Tensor

    def chosen(self, mask: torch.Tensor) -> "Examples":
        return Examples(*(part[mask] for part in self))


@dataclass(frozen=True, slots=True)
class Fit:
    """Of one stage. `guessed` [n]: ln(tokens) as fits that have not seen the answer say."""

    weight: torch.Tensor
    bias: torch.Tensor
    centre: torch.Tensor
    scale: torch.Tensor
    shrinkage: float
    guessed: torch.Tensor


def fit(examples: Examples) -> Fit:
    """Raises ValueError where there are fewer answers than folds."""
    _, answers = examples.answers.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    if len(examples.left) == 0 or int(answers.max()) + 1 < FOLDS:
        raise ValueError(f"too few answers: at least {FOLDS} are needed")
    centre, scale = examples.inputs.mean(0), 1 / (examples.inputs.std(0) + 1e-3)
    ready = examples._replace(inputs=(examples.inputs - centre) * scale, answers=answers)
    best: tuple[float, float, torch.Tensor] | None = None
    for shrinkage in SHRINKAGES:
        guessed, missed = torch.zeros(len(ready.left)), 0.0
        for fold in range(FOLDS):
            out = ready.answers % FOLDS == fold
            weight, bias = _fitted(ready.chosen(~out), shrinkage)
            unseen = ready.chosen(out)
            logs = linear(unseen.inputs, weight, bias).log_softmax(-1)
            guessed[out] = middle(logs)
            missed += float(_missed(logs, unseen))
        if best is None or missed < best[0]:
            best = missed, shrinkage, guessed
    assert best is not None
    return Fit(*_fitted(ready, best[1]), centre, scale, *best[1:])


def install(head: LengthHead, first: Fit, later: Fit) -> None:
    """Fits of the first token, whose inputs are hidden states, and of later ones, which have their mean beside them."""
    for name, found in (("first", first), ("later", later)):
        getattr(head, name).weight.data.copy_(found.weight * found.scale)
        getattr(head, name).bias.data.copy_(found.bias - linear(found.centre * found.scale, found.weight))


def _fitted(examples: Examples, shrinkage: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [BINS, size] and biases [BINS] of least cross entropy."""
    size = examples.inputs.shape[1]
    weight, bias = torch.zeros(BINS, size, requires_grad=True), torch.zeros(BINS, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        logs = linear(examples.inputs, weight, bias).log_softmax(-1)
        total = _missed(logs, examples) + shrinkage * (weight**2).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()


def _missed(logs: torch.Tensor, examples: Examples) -> torch.Tensor:
    """Mean surprise of an answer, in nats, by log-probabilities `logs` [n, BINS]. One that was cut counts as one bin
    longer: what has lasted so long may well last as long again."""
    bins = (examples.left.log2().floor().long() + examples.cut.long()).clamp(max=BINS - 1)
    return -(logs.gather(-1, bins[:, None])[:, 0] * _shares(examples)).sum()


def _shares(examples: Examples) -> torch.Tensor:
    """[n], 1 in all: each answer weighs the same, however many positions it has."""
    counts = examples.answers.bincount()[examples.answers].float()
    return 1 / counts / float((1 / counts).sum())


def explained(true: Sequence[float], guessed: Sequence[float]) -> float:
    """Share of the variance of `true`, after the best line through the guesses; 0 where either has none."""
    pairs = torch.tensor([list(true), list(guessed)], dtype=torch.float64)
    return float((torch.corrcoef(pairs)[0, 1] ** 2).nan_to_num()) if len(true) > 2 else 0.0
