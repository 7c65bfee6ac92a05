"""The `openai` package, unmodified, as its users write: synchronous and asynchronous, streamed and not, and the errors
that it makes of ours."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from protos.v1 import types_pb2
from tests.gateway.harness import WAIT_S, ending, ids
from tests.gateway.openai.harness import Door, door, logprobs

HELLO: Any = [{"role": "user", "content": "the fox"}]


@asynccontextmanager
async def asking(**settings: Any) -> AsyncIterator[tuple[Door, openai.AsyncOpenAI]]:
    async with door(**settings) as at, openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key="any") as client:
        yield at, client


async def answer(at: Door, work: Any, *texts: str) -> Any:
    """What the client's call returns, while each submission gets the next text."""
    task = asyncio.ensure_future(work)
    for text in texts:
        await at.say(await at.link.accept(), text)
    return await asyncio.wait_for(task, WAIT_S)


async def test_a_chat() -> None:
    async with asking() as (at, client):
        said = await answer(at, client.chat.completions.create(model="tiny", messages=HELLO), "jumps")
        assert (said.choices[0].message.content, said.choices[0].finish_reason) == ("jumps", "stop")
        assert said.usage.completion_tokens == len(ids("jumps"))
        assert said.usage.completion_tokens_details.accepted_prediction_tokens == len(ids("jumps"))


async def test_a_streamed_chat_with_several_choices() -> None:
    async with asking() as (at, client):

        async def read() -> dict[int, str]:
            texts: dict[int, str] = {}
            options: Any = {"include_usage": True}
            stream = await client.chat.completions.create(
                model="tiny", messages=HELLO, n=2, stream=True, stream_options=options
            )
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                usage = chunk.usage
            assert usage is not None
            assert usage.completion_tokens == 2 * len(ids("jumps"))
            return texts

        assert await answer(at, read(), "jumps", "jumps") == {0: "jumps", 1: "jumps"}


async def test_the_streaming_helper_puts_the_answer_together() -> None:
    async with asking() as (at, client):

        async def read() -> str:
            async with client.chat.completions.stream(model="tiny", messages=HELLO) as stream:
                async for _ in stream:
                    pass
                final = await stream.get_final_completion()
            return final.choices[0].message.content or ""

        assert await answer(at, read(), "the quick brown") == "the quick brown"


async def test_the_streaming_helper_takes_choices_whichever_speaks_first() -> None:
    async with asking() as (at, client):

        async def read() -> list[str | None]:
            async with client.chat.completions.stream(model="tiny", messages=HELLO, n=3) as stream:
                async for _ in stream:
                    pass
                final = await stream.get_final_completion()
            return [choice.message.content for choice in final.choices]

        task = asyncio.create_task(read())
        submits = [await at.link.accept() for _ in range(3)]
        for submit, text in ((submits[2], "dog"), (submits[0], "fox"), (submits[1], "jumps")):
            await at.say(submit, text)
        assert await asyncio.wait_for(task, WAIT_S) == ["fox", "jumps", "dog"]


@pytest.mark.parametrize("on_disconnect", ["cancel", "detach"])
async def test_a_comment_while_nothing_comes_is_no_event(commented: asyncio.Event, on_disconnect: str) -> None:
    """Behind an id this client takes each empty line for the end of an event."""
    first, *rest = ids("the quick")
    async with asking() as (at, client):
        asked = client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, extra_body={"on_disconnect": on_disconnect}
        )
        asking_for_it = asyncio.ensure_future(asked)
        submit = await at.link.accept()
        await at.link.delta(submit, 0, [first])
        stream = await asyncio.wait_for(asking_for_it, WAIT_S)
        text = (await anext(stream)).choices[0].delta.content or ""
        commented.clear()
        await asyncio.wait_for(commented.wait(), WAIT_S)
        await at.link.delta(submit, 1, rest, ending=ending())
        async with asyncio.timeout(WAIT_S):
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
        assert text == "the quick"


async def test_a_synchronous_stream() -> None:
    async with door() as at:

        def read() -> str:
            with openai.OpenAI(base_url=f"{at.url}/v1", api_key="any") as client:
                stream = client.completions.create(model="tiny", prompt="the fox", stream=True)
                return "".join(chunk.choices[0].text for chunk in stream)

        assert await answer(at, asyncio.to_thread(read), "jumps") == "jumps"


async def test_log_probabilities_are_read_in_both_shapes() -> None:
    async with asking() as (at, client):
        chat = asyncio.create_task(
            client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=2)
        )
        tokens = ids("jumps")
        submit = await at.link.accept()
        await at.link.delta(submit, 0, tokens, logprobs=logprobs(tokens, 2), ending=ending())
        said = (await chat).choices[0].logprobs
        assert said is not None
        assert said.content is not None
        assert b"".join(bytes(each.bytes or []) for each in said.content) == b"jumps"

        older = asyncio.create_task(client.completions.create(model="tiny", prompt="the fox", logprobs=2))
        submit = await at.link.accept()
        await at.link.delta(submit, 0, tokens, logprobs=logprobs(tokens, 2), ending=ending())
        lists = (await older).choices[0].logprobs
        assert lists is not None
        assert "".join(lists.tokens or []) == "jumps"


async def test_models_are_listed() -> None:
    async with asking() as (_, client):
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).owned_by == "laps-sd"


async def test_errors_are_the_clients_own() -> None:
    async with asking() as (_, client):
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny", messages=HELLO, temperature=9)
        assert (bad.value.param, bad.value.code, bad.value.type) == (
            "temperature",
            "invalid_value",
            "invalid_request_error",
        )
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt-4o", messages=HELLO)


async def test_an_expired_request_is_not_tried_again() -> None:
    async with asking() as (at, client):
        task = asyncio.create_task(client.chat.completions.create(model="tiny", messages=HELLO))
        submit = await at.link.accept()
        await at.link.delta(submit, 0, ending=ending(types_pb2.FINISH_REASON_DEADLINE))
        with pytest.raises(openai.InternalServerError) as late:
            await asyncio.wait_for(task, WAIT_S)
        assert late.value.status_code == 504
        assert at.link.received.empty()


async def test_a_refused_request_is_tried_again_when_it_was_told_to() -> None:
    async with asking() as (at, client):
        task = asyncio.create_task(client.chat.completions.create(model="tiny", messages=HELLO))
        submit = await at.link.next("submit")
        refusal = {"request_id": submit.request_id, "code": 8, "message": "full", "retry_after_s": 0.001}
        await at.link.send(refusals=[refusal])
        await at.say(await at.link.accept(), "jumps")
        assert (await asyncio.wait_for(task, WAIT_S)).choices[0].message.content == "jumps"


async def test_a_late_error_of_a_stream_is_raised() -> None:
    async with asking() as (at, client):

        async def read() -> None:
            async for _ in await client.chat.completions.create(model="tiny", messages=HELLO, stream=True):
                pass

        task = asyncio.create_task(read())
        submit = await at.link.accept()
        await at.link.delta(submit, 0, ids("jumps"))
        end = ending(types_pb2.FINISH_REASON_ERROR, message="it broke")
        await at.link.delta(submit, len(ids("jumps")), ending=end)
        with pytest.raises(openai.APIError, match="it broke"):
            await asyncio.wait_for(task, WAIT_S)


async def test_a_structure_that_fails_in_mid_answer_is_not_asked_for_again() -> None:
    async with asking() as (at, client):
        form: Any = {"type": "json_object"}
        call = client.chat.completions.create(model="tiny", messages=HELLO, response_format=form)
        task = asyncio.ensure_future(call)
        submit = await at.link.accept()
        end = ending(types_pb2.FINISH_REASON_ERROR, message="structure: too many items")
        await at.link.delta(submit, 0, ending=end)
        with pytest.raises(openai.BadRequestError, match="response_format: too many items") as refused:
            await asyncio.wait_for(task, WAIT_S)
        assert refused.value.param == "response_format"


async def test_a_function_is_called() -> None:
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    async with asking(context_tokens=2048) as (at, client):
        call = client.chat.completions.create(model="tiny", messages=HELLO, tools=tools, tool_choice="required")
        said = await answer(at, call, '{"a":1}')
        (called,) = said.choices[0].message.tool_calls
        assert (called.function.name, called.function.arguments) == ("weather", '{"a":1}')
        assert said.choices[0].finish_reason == "tool_calls"


async def test_a_client_that_leaves_its_stream_cancels() -> None:
    async with asking() as (at, client):
        task = asyncio.ensure_future(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))
        submit = await at.link.accept()
        await at.link.delta(submit, 0, ids("jumps"))
        stream = await asyncio.wait_for(task, WAIT_S)
        await stream.close()
        assert (await at.link.next("cancel")).request_id == submit.request_id
