"""The bytes of an output's tokens, joined, are its text, whatever kind of tokenizer made it."""

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.chunk import Chunk
from gateway.metrics import Metrics
from gateway.openai.choice import Choice
from gateway.openai.token_bytes import TokenBytes
from protos.v1 import types_pb2
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


@pytest.mark.parametrize("pieces", [[4], [1, 3], [2, 2], [1, 1, 1, 1]])
@pytest.mark.parametrize("chat", [True, False])
def test_the_first_space_is_dropped_behind_special_tokens_too(chat: bool, pieces: list[int]) -> None:
    tokenizer = sentencepiece(LIKE_LLAMA)
    tokenizer.add_special_tokens(["</s>"])  # 259
    choice = Choice(0, "r", figures=Metrics().answer(), chat=chat, of=TokenBytes(tokenizer))
    tokens, entry, said = [259, 259, 256, 257], types_pb2.Logprob(logprob=-1), list[dict[str, Any]]()
    for start, many in zip(accumulate(pieces, initial=0), pieces, strict=False):
        told = choice._said_logprobs(
            Chunk(offset=start, token_ids=tokens[start : start + many], logprobs=[entry] * many)
        )
        assert told is not None
        said.append(told)
    if chat:
        added = bytes(byte for each in said for token in each["content"] for byte in token["bytes"])
        assert added == b"the fox"
    else:
        assert [offset for each in said for offset in each["text_offset"]] == [0, 0, 0, 3]
        assert [name for each in said for name in each["tokens"]] == ["</s>", "</s>", "the", " fox"]
