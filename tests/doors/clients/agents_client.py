"""The package `openai-agents` with its default model class, which speaks the Responses API: a tool that must be called,
whole and streamed, a conversation that goes on, and an answer in a form. What the model says is its own matter; the
loop must come to its end. Usage: URL MODEL."""

import asyncio
import sys
from typing import Any

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
QUESTION = "What is the weather in Paris?"
asked: list[str] = []


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return f"sunny in {city}"


class Place(BaseModel):
    coastal: bool


def agent(**fields: Any) -> Agent[Any]:
    choice = {"tool_choice": "required"} if "tools" in fields else {}
    settings = ModelSettings(temperature=0, max_tokens=60, **choice)
    return Agent(name="a", instructions="Be brief.", model=MODEL, model_settings=settings, **fields)


async def main() -> None:
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=URL, api_key="any"), use_for_tracing=False)
    whole = await Runner.run(agent(tools=[weather]), QUESTION)
    assert len(asked) == 1, asked
    assert whole.final_output
    streamed = Runner.run_streamed(agent(tools=[weather]), QUESTION)
    kinds = {event.type async for event in streamed.stream_events()}
    assert (streamed.final_output, len(asked)) == (whole.final_output, 2)
    assert {"raw_response_event", "run_item_stream_event"} <= kinds
    further = [*whole.to_input_list(), {"role": "user", "content": "And in Rome?"}]
    assert (await Runner.run(agent(tools=[weather]), further)).final_output
    assert isinstance((await Runner.run(agent(output_type=Place), "Is Paris by the sea?")).final_output, Place)


asyncio.run(main())
