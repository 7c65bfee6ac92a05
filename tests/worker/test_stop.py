"""Stop strings, however the tokens cut characters."""

from random import Random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.detokenizer import Detokenizer, byte_table
from worker_service.engine.stop import StopStrings


def cut(text: str, *ends: int) -> tuple[Tokenizer, list[int]]:
    """A text whose tokens end at these bytes, and at its own end."""
    symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    pieces = [symbols[begin:end] for begin, end in zip((0, *ends), (*ends, len(symbols)), strict=True)]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    ids = [vocabulary[piece] for piece in pieces]
    assert tokenizer.decode(ids) == text
    return tokenizer, ids


def test_tokens_that_cut_one_character_after_another_hide_no_stop_string() -> None:
    text = "😀" * 7
    tokenizer, ids = cut(text, *range(2, 28, 4))  # half, six times two halves, half
    stops = StopStrings(tokenizer, [text])
    assert [stops.push(token) for token in ids] == [False] * 7 + [True]


def test_worker_and_gateway_agree_on_the_token_that_completes_a_stop_string() -> None:
    """Also where that token ends within the next character: min_tokens counts up to it."""
    tokenizer, ids = cut("a.” b.", 1, 3, 5, 6, 7)
    stops = StopStrings(tokenizer, ["."])
    assert [stops.push(token) for token in ids] == [False, True, False, False, False, True]
    for min_tokens, shown in {2: "a", 3: "a.” b"}.items():
        gateway = Detokenizer(tokenizer, ["."], min_tokens, byte_table(tokenizer))
        assert gateway.push(ids) + gateway.finish() == shown


def test_a_character_cut_in_three_is_told_once() -> None:
    tokenizer, ids = cut("a😀b", 2, 3)
    stops = StopStrings(tokenizer, ["a😀b"])
    assert [stops.push(token) for token in ids] == [False, False, True]


def test_a_token_without_text_is_not_what_a_text_begins_with() -> None:
    """There some decoders drop a space. Worker and gateway agree."""
    tokenizer = Tokenizer(models.BPE(vocab={"▁a": 0, "▁b": 1, "<s>": 2}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    ids, stops = [0, 2, 2, 1], StopStrings(tokenizer, [" b"])
    assert [stops.push(token) for token in ids] == [False, False, False, True]
    gateway = Detokenizer(tokenizer, [" b"], 0, byte_table(tokenizer))
    assert gateway.push(ids) + gateway.finish() == "a"


def with_a_first_space() -> Tokenizer:
    """As that of Llama 2: a text's first space is not shown. It has special tokens and those of single bytes."""
    pieces = ["<s>", "▁", "▁a", "a", "b", "\n", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    spaces, first = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), first])
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


STRANGE = 77  # no token
OUTPUTS = [[0, 1, 2, 5], *(Random(seed).choices([*range(10), STRANGE], k=12) for seed in range(600))]


@pytest.mark.parametrize("stop", [" a\n", " a", "b a", "\n", "😀", "\ufffd"])
def test_worker_and_gateway_agree_where_the_first_space_of_a_text_is_dropped(stop: str) -> None:
    """Else the client sees nothing from there on, and the worker goes on until `max_tokens`."""
    tokenizer, cut = with_a_first_space(), 0
    for ids in OUTPUTS:
        gateway, worker = Detokenizer(tokenizer, [stop], 0), StopStrings(tokenizer, [stop])
        for token in ids:
            gateway.push([token])
            assert worker.push(token) == gateway._stop._cut, ids
            if gateway._stop._cut:
                cut += 1
                break
    assert cut


def test_tokens_without_text_make_no_later_one_dearer() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"▁a": 0, "<s>": 1}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    stops = StopStrings(tokenizer, ["b"], [0] + [1] * 100)
    assert len(stops._context) == 1
