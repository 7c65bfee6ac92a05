"""Stop strings, however the tokens cut characters."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from worker_service.engine.stop import StopStrings


def test_tokens_that_cut_one_character_after_another_hide_no_stop_string() -> None:
    text = "😀" * 7
    symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    pieces = [symbols[:2], *(symbols[i : i + 4] for i in range(2, len(symbols), 4))]  # half, six times two halves, half
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    ids = [vocabulary[piece] for piece in pieces]
    assert tokenizer.decode(ids) == text
    stops = StopStrings(tokenizer, [text])
    assert [stops.push(token) for token in ids] == [False] * 7 + [True]
