"""The second half of distillation: a head learns to continue from the target's hidden states. No text is made here."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import embedding

from worker_service.distill.data import Sample
from worker_service.engine.drafting.eagle import EagleHead
from worker_service.engine.drafting.head import DraftHead
from worker_service.model_files import ModelError

_CHUNK = 256  # positions whose logits are held at a time: they then stay in the CPU's cache
LATER = 0.8  # weight of each further draft of a chain: it matters only if those before it were right
_SAVE_STEPS = 50
_WARM_UP = 0.02  # share of all steps


def last_states(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The hidden states [n, hidden] that `model` chooses by, at `tokens` [n]."""
    result: torch.Tensor = model.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    return result


class Features:
    """Hidden states of the target at every position of every sample, in a file that grows sample by sample. A second
    file beside it has a digest of each sample, by which states of other samples are noticed."""

    def __init__(self, file: Path, samples: Sequence[Sample], hidden_size: int) -> None:
        """`hidden_size`: numbers that are known at a position."""
        self._file, self._hidden_size = file, hidden_size
        self._begins = np.cumsum([0, *(len(s.prompt) + len(s.output) - 1 for s in samples)]).tolist()
        self._digests = [hashlib.sha256(repr((s.prompt, s.output)).encode()).hexdigest()[:16] for s in samples]
        self.digest = hashlib.sha256("".join(self._digests).encode()).hexdigest()[:16]  # of all samples, in order

    def compute(
        self,
        model: Any,
        samples: Sequence[Sample],
        progress: Callable[[int, int], None],
        known: Callable[[Any, torch.Tensor], torch.Tensor] = last_states,
    ) -> None:
        """Append what is missing, and replace what is of other samples. `model`: the target; `progress` is told the
        samples done and all; `known`: what `model` knows [n, hidden_size] at each of n tokens."""
        row_bytes, names = 2 * self._hidden_size, self._file.with_suffix(".digests")
        have = self._file.stat().st_size // row_bytes if self._file.exists() else 0
        told = names.read_text().split() if names.exists() else []
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(told, self._digests, strict=False)))
        done = min(same, sum(begin <= have for begin in self._begins[1:]))
        with self._file.open("ab") as out, names.open("w", buffering=1) as digests, torch.inference_mode():
            digests.writelines(f"{digest}\n" for digest in self._digests[:done])
            out.truncate(self._begins[done] * row_bytes)
            for i in range(done, len(samples)):
                progress(i, len(samples))
                tokens = torch.tensor((samples[i].prompt + samples[i].output)[:-1], device=model.device)
                hidden = known(model, tokens)
                out.write(hidden.to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().tobytes())
                digests.write(f"{self._digests[i]}\n")
        progress(len(samples), len(samples))

    def of(self, index: int, begin: int) -> torch.Tensor:
        """bfloat16 [positions, hidden] of sample `index` from position `begin` on."""
        first, end = self._begins[index] + begin, self._begins[index + 1]
        shape = (end - first, self._hidden_size)
        rows = np.fromfile(self._file, np.int16, shape[0] * shape[1], offset=2 * first * self._hidden_size)
        return torch.from_numpy(rows.reshape(shape)).view(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Batch:
    """Positions of several answers, one after the other. At each the target knows `hidden` and has chosen `tokens`."""

    hidden: torch.Tensor  # [positions, hidden]
    tokens: torch.Tensor  # [positions]
    answers: torch.Tensor  # [positions]: which answer it belongs to


def draft_vocabulary(samples: Sequence[Sample], size: int) -> list[int]:
    """The `size` tokens that the target uses most, the most frequent first; fewer if it uses fewer."""
    counts = Counter(token for sample in samples for token in sample.output)
    return [token for token, _ in counts.most_common(size)]


def batches(samples: Sequence[Sample], tokens: int, seed: int, most: float = math.inf) -> Iterator[list[int]]:
    """Indices of samples in random order, in batches of some `tokens` of output, or of `most` tokens with the prompts
    where those come first. The rest is left out, unless it is all."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    batch: list[int] = []
    size = whole = 0
    for i in order:
        batch.append(i)
        size += len(samples[i].output)
        whole += len(samples[i].prompt) + len(samples[i].output)
        if size >= tokens or whole >= most:
            yield batch
            batch, size, whole = [], 0, 0
    if len(batch) == len(order):
        yield batch


def initialise(head: DraftHead, model: Any) -> None:
    """Begin with small random weights, the identity from state to state, and the MLP of the target's last layer.

    Where that layer has another form, it begins random too.
    """
    last = list(model.base_model.layers)[-1]
    with torch.no_grad():
        for weight in (head.join.weight, head.gate_up.weight, head.down.weight):
            weight.normal_(std=0.3 / math.sqrt(weight.shape[1]))
        head.join.weight[:, : head.config.hidden_size] += torch.eye(head.config.hidden_size)
        head.output_norm.copy_(model.base_model.norm.weight)
        mlp: Any = getattr(last, "mlp", None)
        if all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")):
            head.gate_up.weight.copy_(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
            head.down.weight.copy_(mlp.down_proj.weight)
            head.mlp_norm.copy_(last.post_attention_layernorm.weight)


class Trainer:
    """A head in training, its optimizer, and the steps done. An interrupted training goes on by `save` and `load`."""

    reads: float = math.inf  # at most so many tokens in a batch for each one of output that was asked for

    def __init__(
        self,
        head: DraftHead | EagleHead,
        embeddings: torch.Tensor,
        output: torch.Tensor,
        *,
        unroll: int,
        learning_rate: float,
    ) -> None:
        """`embeddings`, `output`: the target's tables, both [vocabulary, hidden], bfloat16, on the CPU."""
        self.head: Any = head
        self.step = 0
        self._embeddings, self._output = embeddings, output
        self._rows = output[head.draft_ids]
        self._unroll, self._learning_rate = unroll, learning_rate
        # Kept with what is learned.
        self.options: dict[str, float | str] = {"unroll": unroll, "learning_rate": learning_rate}
        self._optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.02)

    def make_batch(self, samples: Sequence[Sample], features: Features, indices: Sequence[int]) -> Any:
        """What `train_step` takes, of these samples."""
        hidden = [features.of(i, len(samples[i].prompt) - 1) for i in indices]
        tokens = [token for i in indices for token in samples[i].output]
        answers = torch.repeat_interleave(torch.arange(len(indices)), torch.tensor([len(rows) for rows in hidden]))
        return Batch(torch.cat(hidden), torch.tensor(tokens), answers)

    def train_step(self, batch: Any, total_steps: int) -> float:
        """One step of AdamW under a cosine schedule of `total_steps`; returns the loss of the chain's first drafts."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate * _schedule(self.step / total_steps)
        first, loss = self._loss(batch)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self._optimizer.step()
        self.step += 1
        return first

    def _loss(self, batch: Any) -> tuple[float, torch.Tensor]:
        """Cross entropy to the target's own distribution, along a chain that goes on from the head's own states.

        In step j of the chain position i has seen the tokens up to i + j, and learns the target's choice after them. A
        draft is used only if those before it were right, so it may rely on them (training-time test of EAGLE-3, arXiv
        2503.01840).
        """
        with torch.no_grad():
            wanted = torch.cat([(part @ self._rows.T).softmax(-1) for part in torch.split(batch.hidden, _CHUNK)])
        state = batch.hidden
        losses: list[torch.Tensor] = []
        count = len(batch.tokens)
        for j in range(min(self._unroll, count - 1)):
            n = count - j - 1  # positions that have a next token to learn
            with torch.autocast("cpu", torch.bfloat16):
                state = self.head(state[:n].float(), embedding(batch.tokens[j : j + n], self._embeddings).float())
                output = self.head.output(state)
            same = (batch.answers[j + 1 :] == batch.answers[:n]).float()
            loss = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
                output.float(), self._rows, wanted[j + 1 :], same / same.sum().clamp(min=1)
            )
            losses.append(loss)
        total = sum((loss * LATER**j for j, loss in enumerate(losses)), torch.zeros(()))
        return float(losses[0].detach()), total

    def save(self, file: Path) -> None:
        own = {"head": self.head.state_dict(), "optimizer": self._optimizer.state_dict()}
        content = {**own, "step": self.step, "options": self.options}
        scratch = file.with_suffix(".new")
        torch.save(content, scratch)
        scratch.replace(file)

    def load(self, file: Path) -> None:
        """Raises ModelError if the checkpoint is damaged, of a head of another size, or was trained with other options
        or answers: more passes alone are gone on with. What it does not tell, as older ones, is taken on trust and
        stays untold."""
        try:
            file.open("rb").close()  # torch raises an OSError of a damaged file, too
        except OSError as error:
            raise ModelError(f"cannot read {file}: {error.strerror}") from error
        try:
            content = torch.load(file, weights_only=True)
            saved, optimizer, step = (content[name] for name in ("head", "optimizer", "step"))
        except MemoryError:
            raise
        except Exception as error:  # of pickle, of zip, or torch's own
            raise ModelError(f"{file} is damaged ({type(error).__name__}); remove it to train anew") from error
        known = content.get("options", {})
        self.options = {name: value for name, value in self.options.items() if name in known}
        if other := [name for name, value in self.options.items() if not _goes_on(name, known[name], value)]:
            told = " and ".join(_told(name, known[name]) for name in other)
            raise ModelError(f"{file} was trained with {told}; remove it to train anew")
        own = self.head.state_dict()
        if {name: weight.shape for name, weight in own.items()} != {name: each.shape for name, each in saved.items()}:
            told = "was trained with other --draft-tokens or on less output; remove it to train anew"
            raise ModelError(f"{file} {told}")
        self.head.load_state_dict(saved)
        self._optimizer.load_state_dict(optimizer)
        self.step = step
        self._rows = self._output[self.head.draft_ids]  # of the draft vocabulary that the training began with


def train(
    trainer: Trainer,
    samples: Sequence[Sample],
    features: Features,
    checkpoint: Path,
    *,
    passes: int,
    batch_tokens: int,
    progress: Callable[[int, int, float], None],
) -> None:
    """Go `passes` times over `samples`, from `checkpoint` on if there is one. `progress`: steps done, all, the loss."""
    trainer.options |= {"passes": passes, "batch_tokens": batch_tokens, "answers": features.digest}
    if checkpoint.exists():
        trainer.load(checkpoint)
    most = trainer.reads * batch_tokens
    plan = [batch for number in range(passes) for batch in batches(samples, batch_tokens, number, most)]
    for indices in plan[trainer.step :]:
        loss = trainer.train_step(trainer.make_batch(samples, features, indices), len(plan))
        progress(trainer.step, len(plan), loss)
        if trainer.step % _SAVE_STEPS == 0:
            trainer.save(checkpoint)
    trainer.save(checkpoint)


def _goes_on(option: str, trained: Any, told: Any) -> bool:
    """Whether training with a `told` option is a continuation of one with the `trained`."""
    return bool(told >= trained if option == "passes" else told == trained)


def _told(option: str, trained: Any) -> str:
    return "other answers" if option == "answers" else f"--{option.replace('_', '-')} {trained:g}"


def _schedule(done: float) -> float:
    """Share of the learning rate: a short rise, then half a cosine down to a twentieth."""
    return min(done / _WARM_UP + 0.01, 0.05 + 0.95 * (1 + math.cos(math.pi * min(done, 1.0))) / 2)


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy against a distribution, through fixed output rows. Computed chunk by chunk, for all logits together
    would be gigabytes.

    The gradient is computed in the forward pass, so that nothing of the size of the vocabulary is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, rows: torch.Tensor, wanted: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """`output` [n, hidden], `rows` [draft tokens, hidden], `wanted` at least [n, draft tokens], `weight` [n]."""
        gradient = torch.empty_like(output)
        total = 0.0
        for begin in range(0, len(output), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            share = weight[part]
            target = wanted[part][: len(share)]
            logs = (output[part].to(rows.dtype) @ rows.T).log_softmax(-1)
            total -= float((torch.linalg.vecdot(logs, target).float() * share).sum())
            gradient[part] = (logs.exp_().sub_(target) @ rows).float() * share[:, None]
        ctx.save_for_backward(gradient)
        return torch.tensor(total)

    @staticmethod
    def backward(ctx: Any, *grad: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * grad[0], None, None, None
