"""A client that reads nothing does not hold its request for ever."""

import asyncio
import json
import socket

from tests.gateway.harness import WAIT_S, ending
from tests.gateway.openai.harness import CHAT, Door, door, logprobs
from tests.waiting import until

MORE = 400  # tokens of a round: with twenty alternatives each they make a megabyte of events


async def idle(at: Door) -> socket.socket:
    """A client that has asked for a stream, and reads nothing by itself."""
    host, _, port = at.gateway.http.rpartition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (host, int(port)))
    body = json.dumps(CHAT | {"stream": True, "logprobs": True, "top_logprobs": 20, "max_tokens": 90_000}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    await loop.sock_sendall(client, head.encode() + body)
    return client


async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    async with door(stalled_s=0.1, context_tokens=100_000, max_unread_tokens=10**6) as at:
        client = await idle(at)
        submit = await at.link.accept()
        tokens, likeliest, sent = [40] * MORE, logprobs([40] * MORE, 20), 0

        async def left() -> bool:
            """It is asked again and again, while the answer grows."""
            nonlocal sent
            await at.link.delta(submit, sent, tokens, logprobs=likeliest)
            sent += MORE
            return not at.link.received.empty()

        await until(left)
        assert (await at.link.next("cancel")).request_id == submit.request_id
        client.close()


async def test_a_client_that_does_not_read_the_end_of_a_stream_is_cut_off() -> None:
    """The last piece was given to the transport at once, which keeps it; behind it comes what says that it was that."""
    last = 5000  # tokens
    async with door(stalled_s=0.1, context_tokens=100_000, max_unread_tokens=10**6) as at:
        client = await idle(at)
        submit = await at.link.accept()
        await at.link.delta(submit, 0, [40], logprobs=logprobs([40], 20))
        await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), WAIT_S)  # the head is out
        await at.link.delta(submit, 1, [40] * last, logprobs=logprobs([40] * last, 20), ending=ending())

        async def left() -> bool:
            return not any("run_asgi" in repr(task) for task in asyncio.all_tasks())

        await until(left)
        client.close()
