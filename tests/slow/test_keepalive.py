"""A peer that stands still, but whose machine still answers, is given up in time."""

import asyncio
import os
import signal
import sys

import grpc
import pytest

from protos.channels import LINK_MESSAGE_BYTES, options

SERVES = """
import grpc, sys
from concurrent.futures import ThreadPoolExecutor
server = grpc.server(ThreadPoolExecutor(1))
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
server.wait_for_termination()
"""
MOST_S = 60.0  # it is noticed after 30: 20 without a word, and 10 for the answer to a ping


@pytest.mark.timeout(180)
async def test_a_peer_that_stands_still_is_noticed() -> None:
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVES, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    try:
        port = int(await server.stdout.readline())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options(LINK_MESSAGE_BYTES)) as channel:
            await channel.channel_ready()
            os.kill(server.pid, signal.SIGSTOP)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await channel.unary_unary("/nobody/Answers")(b"", timeout=MOST_S)
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        server.kill()
        await server.wait()
