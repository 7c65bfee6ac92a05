"""What transformers itself generates: the text that every part of the stack must reproduce in float32."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TIE = 1e-3  # two best logits closer than this are a tie: either token is right (docs/exactness.md)


class Reference:
    def __init__(self, model: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)

    def chat(self, prompt: str) -> list[int]:
        messages = [{"role": "user", "content": prompt}]
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Token ids after the prompt, the end-of-sequence id included."""
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, use_cache=True
            )
        return list(out[0, len(prompt) :].tolist())

    def same(self, prompt: Sequence[int], ours: Sequence[int], max_tokens: int) -> bool:
        """Whether `ours` is the greedy continuation, up to the first tie of the reference's two best logits."""
        theirs = self.greedy(prompt, max_tokens)
        if list(ours) == theirs:
            return True
        differs = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        if differs is None:
            return False  # one is cut short
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*prompt, *theirs[:differs]]])).logits[0, -1]
        best = logits.topk(2).values
        return bool(best[0] - best[1] <= TIE)
