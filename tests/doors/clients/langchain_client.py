"""The package `langchain-openai` with an address of one's own. Usage: URL MODEL."""

import asyncio
import sys
from typing import Any

from langchain_openai import ChatOpenAI, OpenAI

URL, MODEL = sys.argv[1:]
ASKED: Any = {"model": MODEL, "base_url": URL, "api_key": "any", "temperature": 0, "max_tokens": 16}
QUESTION = "Why is the sky blue?"

chat = ChatOpenAI(**ASKED)
plain = chat.invoke([("system", "You answer briefly."), ("human", QUESTION)])
assert plain.content
assert plain.usage_metadata
assert plain.usage_metadata["output_tokens"] == 16
text = chat.invoke(QUESTION).content
assert "".join(str(chunk.content) for chunk in chat.stream(QUESTION)) == text


async def asynchronous() -> None:
    assert "".join([str(chunk.content) async for chunk in chat.astream(QUESTION)]) == text
    answers = await chat.abatch([QUESTION] * 3)
    assert [answer.content for answer in answers] == [text] * 3


asyncio.run(asynchronous())
assert "5" in OpenAI(**ASKED).invoke("1, 2, 3, 4,")

sky = {
    "title": "sky",
    "type": "object",
    "properties": {"colour": {"enum": ["blue", "red"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
structured = ChatOpenAI(**(ASKED | {"max_tokens": 64})).with_structured_output(sky, method="json_schema")
assert structured.invoke(QUESTION).keys() == {"colour"}
