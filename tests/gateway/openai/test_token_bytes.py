"""The bytes of an output's tokens, joined, are its text, whatever kind of tokenizer made it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.openai.token_bytes import TokenBytes
from tests.gateway.harness import TOKENIZER, ids

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
LIKE_LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def sentencepiece(decoder: object) -> Tokenizer:
    """Of sentencepiece's kind: words with their space, and a token for each byte."""
    tokenizer = Tokenizer(models.BPE(vocab=BYTES | {"▁the": 256, "▁fox": 257, "s": 258}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoder
    return tokenizer


def joined(tokenizer: Tokenizer, tokens: list[int]) -> str:
    of = TokenBytes(tokenizer)
    return b"".join(of.adds(token, first=i == 0) for i, token in enumerate(tokens)).decode(errors="replace")


@given(text=st.text(max_size=20))
def test_of_a_byte_level_tokenizer(text: str) -> None:
    assert joined(TOKENIZER, ids(text)) == text


@pytest.mark.parametrize("decoder", [LIKE_LLAMA, decoders.Metaspace()])
def test_of_sentencepieces_kind(decoder: object) -> None:
    tokenizer = sentencepiece(decoder)
    assert joined(tokenizer, [256, 257, 258]) == "the foxs" == tokenizer.decode([256, 257, 258])


def test_of_bytes_that_stand_for_themselves() -> None:
    tokens = [256, *"é".encode(), 258]
    assert joined(sentencepiece(LIKE_LLAMA), tokens) == "theés" == sentencepiece(LIKE_LLAMA).decode(tokens)


def test_a_special_token_adds_nothing_and_has_a_name() -> None:
    of, eos = TokenBytes(TOKENIZER), TOKENIZER.token_to_id("<eos>")
    assert (of.adds(eos), of.of(eos), of.of(10**6)) == (b"", b"<eos>", b"")
