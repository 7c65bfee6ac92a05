"""The events that make up nearly all of a stream, those that add text and say nothing else: made by writing the text
into an event that is ready but for it. answer.py says what an event looks like."""

from functools import cached_property

from gateway.chunk import Chunk
from gateway.openai import sse
from gateway.openai.answer import Answer

# An event with an empty text is cut here. No name and no id can look so: their quotes are escaped.
_HOLES = {True: b'"content":""', False: b'"text":""'}


class Frames:
    """Of one choice."""

    def __init__(self, answer: Answer, index: int) -> None:
        self._answer, self._choice = answer, answer.choices[index]

    def frame(self, chunk: Chunk, id: int | None = None) -> bytes | None:
        """The event of a chunk; None: it says more than text, or comes first."""
        if not self._choice.adds_text(chunk):
            return None
        before, after = self._around
        name = b"" if id is None else b"id: %d\n" % id
        return name + before + sse.json(chunk.text) + after

    @cached_property
    def _around(self) -> tuple[bytes, bytes]:
        """The bytes before and behind the text."""
        hole = _HOLES[self._answer.chat]
        before, after = sse.event(self._answer.text_event(self._choice)).split(hole)
        return before + hole[:-2], after
