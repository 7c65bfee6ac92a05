"""The package `litellm` with an address of one's own. Usage: URL MODEL."""

import asyncio
import sys
from typing import Any

import litellm

URL, MODEL = sys.argv[1:]
ASKED: Any = {
    "model": f"openai/{MODEL}",
    "api_base": URL,
    "api_key": "any",
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "temperature": 0,
    "max_tokens": 16,
}


async def asynchronous() -> str:
    stream = await litellm.acompletion(**ASKED, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


plain: Any = litellm.completion(**ASKED)
text = plain.choices[0].message.content
assert text
assert plain.usage.completion_tokens == 16
stream: Any = litellm.completion(**ASKED, stream=True, stream_options={"include_usage": True})
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == text
assert asyncio.run(asynchronous()) == text
older: Any = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}",
    prompt="1, 2, 3, 4,",
    api_base=URL,
    api_key="any",
    temperature=0,
    max_tokens=4,
)
assert "5" in older.choices[0].text
try:
    litellm.completion(**(ASKED | {"model": "openai/other"}))
except litellm.NotFoundError:
    pass
else:
    raise AssertionError("another model was taken")
