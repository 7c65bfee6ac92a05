"""pydantic-ai: agents that may call a tool, that must, that are told to try again, and that answer in a form, on a real
model. What it says is its own matter; here it counts that no turn of a conversation is refused. Usage: URL MODEL."""

import asyncio
import sys
from typing import Any

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelRetry, NativeOutput, ToolOutput
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1:]
PROVIDER = OpenAIProvider(base_url=URL, api_key="any")
SETTINGS: Any = {"temperature": 0.0, "max_tokens": 120}
WEATHER = "What is the weather in Paris?"


class Place(BaseModel):
    coastal: bool
    size: int = Field(ge=0, le=9)
    mood: str | None = Field(None, pattern="^[a-z]{1,8}$")


async def free(model: OpenAIChatModel) -> None:
    agent = Agent(model, instructions="Be brief.", model_settings=SETTINGS)

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    whole = await agent.run(WEATHER)
    assert whole.usage.output_tokens
    async with agent.run_stream(WEATHER) as stream:
        assert await stream.get_output() == whole.output
    again = await agent.run("And in Rome?", message_history=whole.all_messages())
    assert again.usage.input_tokens > whole.usage.input_tokens


async def forced(model: OpenAIChatModel) -> None:
    """The first call is sent back, so that the second request tells of a call and of what came of it."""
    agent = Agent(model, output_type=ToolOutput(Place), retries=1, model_settings=SETTINGS)
    refused: list[Place] = []

    @agent.output_validator
    def once_more(place: Place) -> Place:
        if not refused:
            refused.append(place)
            raise ModelRetry("Say it once more.")
        return place

    done = await agent.run("Tell me of Paris.")
    calls = [part for message in done.all_messages() for part in message.parts if isinstance(part, ToolCallPart)]
    assert len(calls) == 2, calls
    assert isinstance(done.output, Place)


async def formed(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    done = await Agent(model, output_type=NativeOutput(Place), model_settings=SETTINGS).run("Tell me of Paris.")
    assert isinstance(done.output, Place)


async def main() -> None:
    chat = OpenAIChatModel(MODEL, provider=PROVIDER)
    await free(chat)
    await forced(chat)
    await formed(chat)
    await formed(OpenAIResponsesModel(MODEL, provider=PROVIDER))


if __name__ == "__main__":
    asyncio.run(main())
