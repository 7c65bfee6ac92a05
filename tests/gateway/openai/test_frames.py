"""Events that only add text are made in a shorter way than others, and look the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chunk import Chunk, Round
from gateway.metrics import Metrics
from gateway.openai import sse
from gateway.openai.answer import Answer
from gateway.openai.choice import Choice
from gateway.openai.fields import Function
from gateway.openai.frames import Frames
from gateway.openai.token_bytes import TokenBytes
from gateway.openai.tools import NOTHING, MayCall
from protos.v1 import types_pb2
from protos.v1.inference_pb2 import Final
from tests.gateway.harness import TOKENIZER

FIRST = Chunk(text="a", token_ids=[1])
ENDS = "\u0085\u2028\u2029"  # of lines, for some


def answer(*, chat: bool = True, model: str = "m", echo: str = "", may: MayCall = NOTHING) -> Answer:
    figures = Metrics().answer()
    choice = Choice(0, "r", figures=figures, chat=chat, of=TokenBytes(TOKENIZER), echo=echo, may=may)
    return Answer(id="a", model=model, chat=chat, choices=[choice], prompt_tokens=1, created=2, started=0.0)


def events(made: Answer, chunk: Chunk, id: int | None = None) -> bytes:
    return b"".join(sse.event(each, id) for each in made.events(0, chunk))


@given(
    text=st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(ENDS)),
    model=st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('"content":""\\')),
    chat=st.booleans(),
    id=st.none() | st.integers(0, 9),
)
def test_an_event_looks_the_same(text: str, model: str, chat: bool, id: int | None) -> None:
    one, other = answer(chat=chat, model=model), answer(chat=chat, model=model)
    events(one, FIRST)
    events(other, FIRST)
    chunk = Chunk(text=text, token_ids=[1, 2], offset=1, rounds=[Round(2, 4, 1)])
    assert Frames(one, 0).frame(chunk, id) == events(other, chunk, id)


@pytest.mark.parametrize(
    ("made", "before", "chunk"),
    [
        pytest.param(answer(), [], FIRST, id="the first, which has the role"),
        pytest.param(answer(echo="b"), [], FIRST, id="the first, which has the prompt"),
        pytest.param(answer(), [FIRST], Chunk(final=Final(finish_reason=types_pb2.FINISH_REASON_STOP)), id="the last"),
        pytest.param(answer(), [FIRST], Chunk(text="b", logprobs=[types_pb2.Logprob()]), id="log-probabilities"),
        pytest.param(answer(may=MayCall((Function(name="f"),))), [FIRST], Chunk(text="b"), id="a call"),
    ],
)
def test_an_event_that_says_more_is_left_to_the_longer_way(made: Answer, before: list[Chunk], chunk: Chunk) -> None:
    for each in before:
        made.events(0, each)
    assert Frames(made, 0).frame(chunk) is None
