"""A client that reads nothing does not hold its request for ever."""

import asyncio
import json
import socket

from tests.gateway.openai.harness import CHAT, door, logprobs
from tests.waiting import until

MORE = 400  # tokens of a round: with twenty alternatives each they make a megabyte of events


async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    async with door(stalled_s=0.1, context_tokens=100_000, max_unread_tokens=10**6) as at:
        host, _, port = at.gateway.http.rpartition(":")
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        body = json.dumps(CHAT | {"stream": True, "logprobs": True, "top_logprobs": 20, "max_tokens": 90_000}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(client, head.encode() + body)
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
