"""Which models there are, and tokens without an answer."""

from typing import Any

import pytest

from gateway.front import ENCODERS
from gateway.text import TextModel
from tests.gateway.harness import CONTEXT_TOKENS, ids
from tests.gateway.openai.harness import CHAT, HELLO, door


async def test_the_model_is_listed_and_found_by_its_name() -> None:
    async with door() as at:
        listed = (await at.http.get("/v1/models")).json()
        (card,) = listed["data"]
        assert (listed["object"], card["id"], card["object"], card["max_model_len"]) == (
            "list",
            "tiny",
            "model",
            CONTEXT_TOKENS,
        )
        assert (await at.http.get("/v1/models/tiny")).json() == card
        answer = await at.http.get("/v1/models/org/other")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_the_model_may_have_further_names() -> None:
    async with door(model_aliases=("gpt-4o", "tiny")) as at:
        listed = (await at.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"]) for card in listed] == [("tiny", "tiny"), ("gpt-4o", "tiny")]
        answer, _ = await at.answered(CHAT | {"model": "gpt-4o"})
        assert (answer.status_code, answer.json()["model"]) == (200, "gpt-4o")


async def test_what_the_engine_keeps_less_of_is_told_with_the_model() -> None:
    engine = {"refused": {"structure": "not here"}, "caveats": ["Sampled text depends on drafts."]}
    async with door(engine=engine) as at:
        card = (await at.http.get("/v1/models/tiny")).json()
        assert (card["refused_fields"], card["caveats"]) == (engine["refused"], engine["caveats"])


async def test_text_to_tokens_and_back() -> None:
    async with door() as at:
        said = (await at.http.post("/tokenize", json={"model": "tiny", "prompt": "the fox"})).json()
        assert said == {
            "count": 1 + len(ids("the fox")),
            "max_model_len": CONTEXT_TOKENS,
            "tokens": [0, *ids("the fox")],
        }
        back = await at.http.post("/detokenize", json={"model": "tiny", "tokens": said["tokens"]})
        assert back.json() == {"prompt": "<bos>the fox"}


async def test_the_count_of_messages_is_what_an_answer_to_them_says() -> None:
    async with door() as at:
        said = (await at.http.post("/tokenize", json={"model": "tiny", "messages": HELLO})).json()
        answer, _ = await at.answered(CHAT)
        assert said["count"] == answer.json()["usage"]["prompt_tokens"]


async def test_a_text_beyond_the_context_can_be_counted() -> None:
    async with door() as at:
        said = (await at.http.post("/tokenize", json={"model": "tiny", "prompt": "fox" * 100})).json()
        assert said["count"] > CONTEXT_TOKENS


async def test_bad_input_is_named() -> None:
    async with door() as at:
        error = await at.refused({"model": "tiny"}, "/tokenize")
        assert (error["status"], error["param"]) == (400, "prompt")
        for messages, field in (([], "messages"), ([{"role": "nobody", "content": "the fox"}], "messages[0].role")):
            error = await at.refused({"model": "tiny", "messages": messages}, "/tokenize")
            assert (error["status"], error["param"]) == (400, field)
        for token in (-1, 10**9, 2**40, "a", 1.5):
            error = await at.refused({"model": "tiny", "tokens": [token]}, "/detokenize")
            assert (error["status"], error["param"].partition("[")[0]) == (400, "tokens")


async def test_the_document_lists_every_path_that_is_served() -> None:
    async with door() as at:
        document = (await at.http.get("/openapi.json")).json()
        assert "/v1/chat/completions" in document["paths"]
        fields = document["components"]["schemas"]["Chat"]["properties"]
        assert {"messages", "logit_bias", "class"} <= fields.keys()


async def test_few_of_a_tenants_texts_are_made_of_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, decode = [], TextModel.decode

    def counted(self: TextModel, *given: Any, **how: Any) -> str:
        taken.append(ENCODERS - encoders._value)
        return decode(self, *given, **how)

    monkeypatch.setattr(TextModel, "decode", counted)
    async with door() as at:
        encoders = at.gateway.front.encoders()
        assert (await at.http.post("/detokenize", json={"model": "tiny", "tokens": ids("fox")})).status_code == 200
        assert taken == [1]
        assert encoders._value == ENCODERS
