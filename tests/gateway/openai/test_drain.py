"""A gateway that drains: streams go on to their end, and whoever comes now is told when to try again."""

import asyncio

from tests.gateway.harness import WAIT_S, ids
from tests.gateway.openai.harness import CHAT, door
from tests.waiting import until


async def test_a_stream_is_finished_and_a_new_request_is_told_to_come_back() -> None:
    async with door() as at:
        stream = at.asked(CHAT | {"stream": True})
        submit = await at.link.accept()
        await at.link.delta(submit, 0, ids("jumps")[:1])
        drained = asyncio.create_task(at.gateway.drain(WAIT_S))

        async def draining() -> bool:
            return at.gateway.front.draining

        await until(draining)
        refused = await at.http.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert not drained.done()
        await at.say(submit, "jumps")
        assert (await asyncio.wait_for(stream, WAIT_S)).text.endswith("data: [DONE]\n\n")
        await asyncio.wait_for(drained, WAIT_S)
