"""Targets without files: shapes of real models with random weights, and a drafter whose acceptance is set. For speed.

The text is worthless and known: the target counts. Its head's row of token t + 1 is the embedding of t, which outweighs
what its small random layers add, so the token after t is t + 1 in any dtype and batch, at a real model's costs.
"""

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from worker_service.engine.drafting.drafter import Ask, Drafter
from worker_service.engine.sampling import uniform


class Shape(NamedTuple):
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    context_tokens: int = 8192


SHAPES = {"llama-8b": Shape(32, 4096, 14336, 32, 8, 128256), "tiny": Shape(2, 64, 128, 4, 2, 512, 1024)}


def counting_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """A causal LM of the transformers library in eval mode, the same at every call."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context_tokens,
        initializer_range=0.005,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)  # made where and as it is used: of eight billion weights there is one copy
    try:
        with device:
            model = LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embeddings.normal_()
    head.copy_(embeddings.roll(1, 0))
    return model


def tokenizer() -> Any:
    """Of the kind that the engine asks for; nothing here has a text."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")))


def prompts(shape: Shape, count: int, tokens: int) -> list[list[int]]:
    rng = Random(0)
    return [[rng.randrange(shape.vocabulary) for _ in range(tokens)] for _ in range(count)]


class OracleDrafter(Drafter):
    """Counts on like the target, and is wrong with probability 1 - `acceptance`, keyed by request and position."""

    def __init__(self, vocabulary: int, acceptance: float) -> None:
        self._vocabulary, self._acceptance = vocabulary, acceptance

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        self.chances = [[self._acceptance ** (i + 1) for i in range(ask.draft_len)] for ask in asks]
        return [self._drafts(ask) for ask in asks]

    def _drafts(self, ask: Ask) -> list[int]:
        seed, begin = crc32(ask.request_id.encode()), len(ask.tokens)
        right = [uniform(seed, begin + i) < self._acceptance for i in range(ask.draft_len)]
        return [(ask.tokens[-1] + i + (1 if hit else 2)) % self._vocabulary for i, hit in enumerate(right)]
