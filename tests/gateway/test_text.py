"""Text to tokens and back: templates, incomplete characters, stop strings."""

import gzip
from collections.abc import Sequence
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.detokenizer import ByteTable, Detokenizer, LibraryText, StopCutter, byte_table
from gateway.text import BadChat, BadVariables, TextModel
from tests.gateway.harness import TOKENIZER, ids, model_info

MODEL = TextModel(model_info())
TABLES = st.sampled_from([None, byte_table(TOKENIZER)])  # text by the library, and by the bytes of tokens


def test_a_raw_prompt_gets_the_tokenizers_special_tokens() -> None:
    assert MODEL.encode_prompt("the fox") == [TOKENIZER.token_to_id("<bos>"), *ids("the fox")]


def test_a_chat_has_only_the_special_tokens_of_its_template() -> None:
    assert MODEL.encode_chat([{"role": "user", "content": "hi"}]) == ids("<bos>user: hi\nassistant: ")


def test_a_template_may_refuse_the_messages() -> None:
    with pytest.raises(BadChat, match="system must come first"):
        MODEL.encode_chat([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}])


def test_a_template_cannot_reach_into_python() -> None:
    model = TextModel(model_info(template="{{ messages.__class__.__mro__ }}"))
    with pytest.raises(BadChat, match="unsafe"):
        model.encode_chat([{"role": "user", "content": "a"}])


def test_tojson_escapes_nothing_for_html() -> None:
    model = TextModel(model_info(template="{{ messages[0].content | tojson }}"))
    assert TOKENIZER.decode(model.encode_chat([{"role": "user", "content": "<é>"}])) == '"<é>"'


def test_tojson_takes_what_transformers_lets_templates_say() -> None:
    words = "ensure_ascii=True, separators=(',', ':'), sort_keys=True"
    model = TextModel(model_info(template="{{ {'b': 'é', 'a': 1} | tojson(" + words + ") }}"))
    assert TOKENIZER.decode(model.encode_chat([])) == '{"a":1,"b":"\\u00e9"}'


def test_what_a_template_marks_for_trainers_is_shown_like_the_rest() -> None:
    inside = "{% generation %}{% set end = '?' %}{{ m.content }}{% endgeneration %}"
    text = "{% set end = '!' %}{% for m in messages %}" + inside + "{{ end }}{% endfor %}"
    model = TextModel(model_info(template=text))
    assert TOKENIZER.decode(model.encode_chat([{"role": "assistant", "content": "hi"}])) == "hi!"


def test_tools_and_documents_are_none_as_transformers_has_them() -> None:
    model = TextModel(model_info(template="{{ tools is none and documents is none }}"))
    assert TOKENIZER.decode(model.encode_chat([])) == "True"


def test_a_template_that_wants_parts_gets_the_text_as_one() -> None:
    shown = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    model = TextModel(model_info(template="{% for m in messages %}" + shown + "{% endfor %}"))
    assert TOKENIZER.decode(model.encode_chat([{"role": "user", "content": "the fox"}])) == "the fox"


def test_a_template_may_want_the_parts_of_one_role_alone() -> None:
    parts = "{% for part in m.content %}{{ part.text }}{% endfor %}"
    text = "{% for m in messages %}{% if m.role == 'user' %}" + parts + "{% else %}{{ m.content + '!' }}{% endif %}"
    model = TextModel(model_info(template=text + "{% endfor %}"))
    said = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    assert TOKENIZER.decode(model.encode_chat(said)) == "a!bc!"


def test_what_ends_an_answer_is_no_text_of_it_though_the_tokenizer_does_not_call_it_special() -> None:
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.add_tokens(["<end>"])
    info = model_info()
    info.tokenizer_json = gzip.compress(tokenizer.to_str().encode())
    info.eos_ids.append(tokenizer.token_to_id("<end>"))
    model = TextModel(info)
    text = model.detokenizer()
    assert text.push([*ids("the"), tokenizer.token_to_id("<end>")]) + text.finish() == "the"
    assert model.encode_prompt("<end>") == tokenizer.encode("<end>").ids


@pytest.mark.parametrize(
    "broken",
    ["{% for m in messages %}{{ m.content ", "{% for m in messages %}" * 200 + "{% endfor %}" * 200],
    ids=["unfinished", "too deep for Python"],
)
def test_a_broken_template_refuses_chats_alone(broken: str) -> None:
    model = TextModel(model_info(template=broken))
    assert model.encode_prompt("the")
    with pytest.raises(BadChat, match="chat template of the model tiny is broken: "):
        model.encode_chat([{"role": "user", "content": "a"}])


def test_a_model_without_template_says_so() -> None:
    with pytest.raises(BadChat, match="no chat template"):
        TextModel(model_info(template="")).encode_chat([{"role": "user", "content": "a"}])


def test_a_tokenizer_that_unpacks_to_too_much_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protos.models.MOST_TOKENIZER_BYTES", 1 << 10)
    info = model_info()  # its tokenizer is longer, and could be used
    with pytest.raises(ValueError, match="unpacks to more than 1024 bytes"):
        TextModel(info)


def test_an_unusable_tokenizer_is_a_value_error() -> None:
    info = model_info()
    info.tokenizer_json = b"not gzip"
    with pytest.raises(ValueError, match="unusable"):
        TextModel(info)


def test_half_a_character_is_withheld_until_it_is_whole() -> None:
    detokenizer = MODEL.detokenizer()
    first, *rest = ids("é")
    assert detokenizer.push([first]) == ""
    assert detokenizer.push(rest) == "é"


def test_half_a_character_at_the_end_becomes_the_replacement_character() -> None:
    detokenizer = MODEL.detokenizer()
    assert detokenizer.push(ids("a") + ids("é")[:1]) + detokenizer.finish() == "a\ufffd"


def test_bytes_that_are_no_text_end_no_stream() -> None:
    """Byte fallback: a run of bytes that turns out to be no UTF-8 decodes to less than it did before."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    detokenizer = Detokenizer(tokenizer, (), 0)
    assert detokenizer.push([*b"(\xf0", 256, *"é".encode()]).endswith("aé")


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (["éèêë".encode(), b"\xf0", "a", "▁", "b", "a", "a"], "éèêë\ufffda baa"),
        (["éè".encode(), b"\xf0", "a", "▁", "b", "▁", "b"], "éè\ufffda b b"),
        (["မြန်မာ".encode(), b"\xe1"], "မြန်မာ\ufffd"),
    ],
)
def test_bytes_that_are_no_text_change_nothing_that_was_shown(pieces: list[bytes | str], text: str) -> None:
    """Byte fallback, as Llama 2 and Mistral have it."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "b": 257, "▁": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    last = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), *last])
    tokens = [token for piece in pieces for token in (piece if isinstance(piece, bytes) else [vocabulary[piece]])]
    detokenizer = Detokenizer(tokenizer, (), 0)
    shown = [detokenizer.push([token]) for token in tokens]
    assert "".join(shown) + detokenizer.finish() == text


PIECES = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "▁b": 257, "</s>": 258, "▁": 259, "\ufffd": 260}
NO_TOKEN = 300
SPACED = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def sentence_pieces(decoder: list[decoders.Decoder]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=PIECES, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(decoder)
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@pytest.mark.parametrize("decoder", [SPACED, [*SPACED, decoders.Strip(" ", 1, 0)], [decoders.Metaspace()]])
@given(
    st.lists(
        st.sampled_from([[256], [257], [259], [260], [258] * 6, [258] * 20, [NO_TOKEN] * 6, [*"é".encode()]]),
        max_size=12,
    ),
    st.integers(1, 9),
    st.integers(0, 20),
)
def test_the_text_is_that_of_all_tokens(
    decoder: list[decoders.Decoder], parts: list[list[int]], at_once: int, inside: int
) -> None:
    """With tokens, too, that are none, and special ones within a character."""
    tokenizer = sentence_pieces(decoder)
    first, *rest = "🦊".encode()
    tokens = [*chain(*parts), first, *[258] * inside, *rest]
    text = LibraryText(tokenizer)
    said = "".join(text.add(tokens[start : start + at_once]) for start in range(0, len(tokens), at_once))
    assert said + text.rest() == tokenizer.decode(tokens)


@pytest.mark.parametrize("at_once", [1, 2, 64])
@pytest.mark.parametrize(("token", "shown"), [("</s>", ""), ("<0xFF>", "\ufffd" * 200), ("<0xE2>", "\ufffd" * 200)])
def test_tokens_without_text_make_no_later_one_dearer(token: str, shown: str, at_once: int) -> None:
    text = LibraryText(sentence_pieces(SPACED))
    decode, most = text._decode, 0

    def counted(token_ids: Sequence[int]) -> str:
        nonlocal most
        most = max(most, len(token_ids))
        return decode(token_ids)

    text._decode = counted  # type: ignore[method-assign]
    tokens = [256, *[PIECES[token]] * 200, *"é".encode(), 257]
    said = "".join(text.add(tokens[start : start + at_once]) for start in range(0, len(tokens), at_once))
    assert said + text.rest() == f" a{shown}" + ("é b" if not shown else "\ufffd\ufffd b")
    assert most < 2 * (at_once + 20)


def test_a_character_behind_many_special_tokens_is_whole() -> None:
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])  # so that it is not made of bytes
    for specials in range(40):
        detokenizer = Detokenizer(tokenizer, (), 0, byte_table(tokenizer))
        tokens = [*ids("a"), *[tokenizer.token_to_id("<eos>")] * specials, *ids("🦊")]
        assert "".join(detokenizer.push([token]) for token in tokens) == "a🦊"


def test_special_tokens_are_no_text() -> None:
    detokenizer = MODEL.detokenizer()
    assert detokenizer.push([*ids("end"), TOKENIZER.token_to_id("<eos>")]) + detokenizer.finish() == "end"


def test_the_beginning_of_a_stop_string_is_withheld_then_released() -> None:
    cutter = StopCutter(["END"])
    assert cutter.push("the E") == "the "
    assert cutter.push("agle") == "Eagle"
    assert cutter.push(" EN") == " "
    assert cutter.flush() == "EN"


@pytest.mark.parametrize("chunks", [["ab", "c"], ["abc"], ["a", "b", "c"]])
def test_the_stop_string_that_is_complete_first_wins_in_any_chunking(chunks: list[str]) -> None:
    cutter = StopCutter(["abc", "b"])
    assert "".join(map(cutter.push, chunks)) + cutter.flush() == "a"


def test_a_stop_string_before_min_tokens_does_not_count() -> None:
    tokens = ids("a.b.c")
    detokenizer = MODEL.detokenizer(["."], min_tokens=len(ids("a.")) + 1)
    assert detokenizer.push(tokens) + detokenizer.finish() == "a.b"


def cut(text: str, stops: list[str]) -> str:
    """The rule, read off one character at a time."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))]
    return text


@given(
    tokens=st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40)
    | st.text(alphabet="aé€🦊\ufffd .", max_size=20).map(ids),
    stops=st.lists(st.text(alphabet="aeh é\ufffd", min_size=1, max_size=3), max_size=3),
    table=TABLES,
    data=st.data(),
)
def test_deltas_add_up_to_the_whole_text_cut_at_the_stop(
    tokens: list[int], stops: list[str], table: ByteTable | None, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=6)))
    detokenizer = Detokenizer(TOKENIZER, stops, 0, table)
    bounds = zip([0, *cuts], [*cuts, len(tokens)], strict=True)
    text = "".join(detokenizer.push(tokens[begin:end]) for begin, end in bounds) + detokenizer.finish()
    assert text == cut(MODEL.decode(tokens), stops)


@given(
    tokens=st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=20)
    | st.text(alphabet="aé€🦊\ufffd .", max_size=10).map(ids),
    cut_at=st.integers(0, 20),
    table=TABLES,
)
def test_what_is_shown_of_some_tokens_does_not_depend_on_how_they_came(
    tokens: list[int], cut_at: int, table: ByteTable | None
) -> None:
    """Else a stream that is resumed there would repeat a character, or lose one."""
    together, apart = (Detokenizer(TOKENIZER, (), 0, table) for _ in range(2))
    shown = together.push(tokens[:cut_at]) + together.push(tokens[cut_at:])
    assert shown == "".join(apart.push([token]) for token in tokens)


def test_added_tokens_are_text_as_the_library_has_them() -> None:
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.add_tokens(["<tool>", "\u0120the", "é"])  # the second one is " the" in the alphabet of bytes
    tokens = [*range(tokenizer.get_vocab_size())][-3:]
    detokenizer = Detokenizer(tokenizer, (), 0, byte_table(tokenizer))
    assert detokenizer.push(tokens) + detokenizer.finish() == tokenizer.decode(tokens)


def test_a_tokenizer_that_does_more_than_join_bytes_is_left_to_the_library() -> None:
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert byte_table(tokenizer) is None


SAID = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The "}]
THINKING = "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %} no thoughts{% endif %}"


def test_a_client_sets_a_variable_of_the_template() -> None:
    model = TextModel(model_info(template=THINKING))
    assert model.encode_chat(SAID) == ids("hi")
    assert model.encode_chat(SAID, {"enable_thinking": False}) == ids("hi no thoughts")


@pytest.mark.parametrize(
    "name", ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "raise_exception", "range"]
)
def test_a_client_does_not_set_what_the_service_sets(name: str) -> None:
    with pytest.raises(BadVariables, match=f"^the service itself sets {name}$"):
        MODEL.encode_chat(SAID, {name: "a", "own": 1})


def test_a_variable_may_have_any_name_and_a_template_may_stumble_over_it() -> None:
    assert MODEL.encode_chat(SAID, {"self": 1, "loop": 2, "__class__": 3, "": 4, "a b": 5}) == MODEL.encode_chat(SAID)
    model = TextModel(model_info(template="{{ 'a' * times }}"))
    with pytest.raises(BadChat, match="template refuses"):
        model.encode_chat(SAID, {"times": {}})


def test_the_text_ends_before_the_answer_begins_if_that_is_asked() -> None:
    assert MODEL.encode_chat(SAID[:1], generation_prompt=False) == ids("<bos>user: hi\n")


def test_the_last_message_goes_on_with_its_spaces() -> None:
    going_on = MODEL.encode_chat(SAID, generation_prompt=False, continues=True)
    assert TOKENIZER.decode(going_on, skip_special_tokens=False) == "<bos>user: hi\n<bos>assistant: The "
    trimming = TextModel(model_info(template="{% for m in messages %}{{ m.content | trim }}.{% endfor %}"))
    assert TOKENIZER.decode(trimming.encode_chat(SAID, generation_prompt=False, continues=True)) == "hi.The "


def test_a_template_that_hides_the_last_message_cannot_go_on() -> None:
    model = TextModel(model_info(template="{{ messages[0].content }}"))
    with pytest.raises(BadChat, match="so it cannot go on"):
        model.encode_chat(SAID, generation_prompt=False, continues=True)
