"""Uses of the client for mypy (test_typing.py); nothing runs. mypy must refuse a line that ends with the word wrong and
a code with that code, and no other line."""

from datetime import timedelta

from laps_sd import AsyncClient, Client


def right(client: Client) -> None:
    answer = client.complete("a", max_tokens=5, temperature=0.5, priority="batch", stop=["b"], timeout_s=3.0)
    text: str = answer.text
    tokens: list[int] = answer.token_ids
    used: int = answer.usage.completion_tokens
    for chunk in client.generate(messages=[{"role": "user", "content": "a"}], json_schema={"type": "object"}):
        text += chunk.text
        tokens += chunk.token_ids
    queued: timedelta = client.status("r").queue_time
    idle: float = client.stats().workers[0].idle_share
    assert f"{text} {tokens} {used} {queued} {idle}"


async def right_too(client: AsyncClient) -> None:
    async for chunk in client.generate(tokens=[1, 2], logit_bias={5: -1.0}, on_disconnect="detach"):
        assert chunk.offset >= 0
    state = (await client.status("r")).state
    assert state != "paused"


def wrong(client: Client) -> None:
    client.complete("a", max_tokenz=5)  # wrong: call-arg
    client.complete("a", temperature="hot")  # wrong: arg-type
    client.complete("a", priority="high")  # wrong: arg-type
    client.complete("a", stop=5)  # wrong: arg-type
    client.complete(5)  # wrong: arg-type
    client.generate("a", on_disconnect=2)  # wrong: arg-type
    text: str = client.complete("a").txt  # wrong: attr-defined
    assert client.status("r").state != "pausing"  # wrong: comparison-overlap
    assert text
    Client(api_kee="a")  # wrong: call-arg


async def wrong_too(client: AsyncClient) -> None:
    await client.complete("a", max_tokenz=5)  # wrong: call-arg
    for _ in client.generate("a"):  # wrong: attr-defined
        pass
