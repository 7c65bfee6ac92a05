"""The texts that the stack must reproduce, from transformers' model in float32, token by token. No stack here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from worker_service.engine.sampling import draw, uniform, weights
from worker_service.engine.types import Sampling

SAMPLINGS = (Sampling(), Sampling(temperature=0.5, seed=7), Sampling(temperature=0.5, seed=2**64 - 1))
FEWEST = 30  # tokens; a text that becomes unclear sooner is left out
SLACK = 4.0  # times the largest difference of logits that another shape of the pass has made
PROMPTS = (
    "Once upon a time there was a queue.",
    "In the queue there were requests:",
    "The quick brown fox jumps over the lazy dog.",
    "A short request overtakes a long one, and",
    "Speculative decoding drafts several tokens;",
    "Nobody waits longer than needed.",
    "Dear reader, größer als Ω ist nur",  # characters of several bytes: half ones must not come out
    "def answer(question):\n    return",
    "one, two, three,",
    "What happens when a scheduler dies?",
)


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, how its tokens are chosen, and the output: as far as no other order of float32 sums could change it."""

    prompt: str
    sampling: Sampling
    tokens: tuple[int, ...]

    def params(self) -> dict[str, Any]:
        """Fields of GenerateRequest."""
        chosen = {"temperature": self.sampling.temperature, "seed": self.sampling.seed}
        return {"prompt": self.prompt, "ignore_eos": True, **(chosen if self.sampling.temperature else {})}


class Book:
    def __init__(
        self, model: Path, tokens: int, prompts: int = len(PROMPTS), samplings: Sequence[Sampling] = SAMPLINGS
    ) -> None:
        """`tokens`: of each text, at most."""
        torch.set_num_threads(1)  # passes of one token: more threads only wait for one another
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        texts = [
            Text(prompt, sampling, tuple(_generate(reference, self._tokenizer(prompt).input_ids, sampling, tokens)))
            for prompt in PROMPTS[:prompts]
            for sampling in samplings
        ]
        self.texts = [text for text in texts if len(text.tokens) >= FEWEST]

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    def ids(self, text: Text) -> list[int]:
        """Of the prompt."""
        return list(self._tokenizer(text.prompt).input_ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@torch.inference_mode()
def _generate(model: Any, prompt: Sequence[int], sampling: Sampling, most: int) -> Iterator[int]:
    """The output, up to where it is no longer clear."""
    ids, cache, rows, tokens = torch.tensor([prompt]), None, [], []
    for position in range(most):
        passed = model(ids, past_key_values=cache, use_cache=True)
        cache, logits = passed.past_key_values, passed.logits[0, -1]
        token = draw(logits, sampling, position) if sampling.temperature else int(logits.argmax())
        assert token is not None, "logits that are no distribution"
        rows.append(logits)
        tokens.append(token)
        ids = torch.tensor([[token]])
    at_once = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    error = SLACK * float((torch.stack(rows) - at_once).abs().max())
    for position, (token, logits) in enumerate(zip(tokens, rows, strict=True)):
        if not _clear(logits, token, sampling, position, error):
            return
        yield token


def _clear(logits: torch.Tensor, token: int, sampling: Sampling, position: int, error: float) -> bool:
    """Whether logits that differ by `error` give the same token."""
    if not sampling.temperature:
        first, second = logits.topk(2).values.tolist()
        return bool(first - second > 2 * error)
    cumulative = weights(logits, sampling).cumsum(0, dtype=torch.float64)
    cumulative /= cumulative[-1].clone()
    below = float(cumulative[token - 1]) if token else 0.0
    point = uniform(sampling.seed, position)
    # A share c of the sum moves by 2 c (1 - c) times the error over the temperature at most.
    return min(point - below, float(cumulative[token]) - point) > error / sampling.temperature / 2
