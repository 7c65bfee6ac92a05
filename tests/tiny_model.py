"""A tiny random causal LM in a Hugging Face directory, the same at every call: fast tests, not sensible text."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "<|im_end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "A short request overtakes a long one, and nobody waits longer than needed.",
    "Speculative decoding drafts several tokens; the target model verifies them in one forward pass.",
    "Once upon a time there was a queue. In the queue there were requests: short ones, long ones, and one with a tail.",
]


def make_tiny_model(
    folder: Path,
    *,
    context_tokens: int = 1024,
    seed: int = 0,
    layers: int = 2,
    heads: int = 4,
    tied: bool = True,
    shard: str = "5GB",
) -> Path:
    """Save config, safetensors and tokenizer (byte-level BPE, some 400 tokens, chat template, eos) into `folder`.

    `heads`: they have 64 numbers together, and two share a key and a value. `tied`: whether the head is the embeddings.
    `shard`: how large a file of weights may be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=context_tokens,
        initializer_range=0.12,  # the greedy text then both varies and repeats itself: n-gram drafts hit and miss
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).eval().save_pretrained(folder, max_shard_size=shard)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|im_start|>", EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|im_start|>", eos_token=EOS, pad_token=EOS, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer
