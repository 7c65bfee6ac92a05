"""Nothing keeps the gateway's event loop to itself: how much is done between two of its turns. Counted, not timed."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from unittest import mock

import pytest

from gateway import validate
from gateway.detokenizer import TOKENS_AT_ONCE
from gateway.feed import Feed
from gateway.link import AT_ONCE, DELTAS_AT_ONCE, Link
from gateway.metrics import Metrics
from gateway.text import TextModel
from protos.errors import NotServing
from protos.link.v1 import gateway_link_pb2 as pb
from protos.metrics import measure_loop_lag
from protos.tls import Tls
from protos.v1 import inference_pb2
from tests.gateway.harness import ids, model_info
from tests.gateway.openai.harness import COMPLETION, door
from tests.waiting import until

STREAMS = 200


class Turns:
    """Counts the turns of the running event loop."""

    def __init__(self) -> None:
        self.number = 0
        self.calls: Counter[int] = Counter()  # by the turn in which they were made

    def _turn(self) -> None:
        self.number += 1
        self._handle = asyncio.get_running_loop().call_soon(self._turn)

    @contextmanager
    def watch(self, owner: Any, name: str) -> Iterator[None]:
        """Count the calls of a method, until the block ends."""
        method: Callable[..., Any] = getattr(owner, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            self.calls[self.number] += 1
            return method(*arguments, **named)

        self.calls.clear()
        self._turn()
        with mock.patch.object(owner, name, counted):
            yield
        self._handle.cancel()

    @property
    def most(self) -> int:
        return max(self.calls.values())


@asynccontextmanager
async def linked() -> AsyncIterator[Link]:
    """A link with streams that the scheduler has acknowledged."""
    limits = {"max_requests": STREAMS, "reconnect_timeout_s": 30, "rpc_timeout_s": 1}
    link = Link(["nowhere:1"], Tls(), **limits, on_ready=mock.AsyncMock())  # type: ignore[arg-type]
    link.scheduler = mock.Mock(up=True)
    names = [f"r{number}" for number in range(STREAMS)]
    for name in names:
        link.submit(pb.Submit(request_id=name))
    await link._receive(pb.ToGateway(accepted=names))
    link.scheduler.send.reset_mock()
    yield link


async def test_streams_that_are_followed_on_a_new_link() -> None:
    async with linked() as link:
        with (turns := Turns()).watch(Feed, "on"):
            await link._linked()
        assert turns.calls.total() == STREAMS
        assert turns.most <= AT_ONCE
        sent = [call.args[0] for call in link.scheduler.send.call_args_list]  # type: ignore[attr-defined]
        assert sum(len(message.follows.follow) for message in sent) == STREAMS
        assert len(sent) == -(-STREAMS // AT_ONCE)


async def test_deltas_of_many_streams_in_one_message() -> None:
    async with linked() as link:
        message = pb.ToGateway(deltas=[pb.Delta(request_id=id, tokens=[1]) for id in link.feeds])
        with (turns := Turns()).watch(Feed, "put"):
            await link._receive(message)
        assert turns.calls.total() == STREAMS
        assert turns.most <= AT_ONCE


async def test_deltas_of_one_stream_in_one_message() -> None:
    async with linked() as link:
        message = pb.ToGateway(deltas=[pb.Delta(request_id="r0", start=at, tokens=[1]) for at in range(1000)])
        with (turns := Turns()).watch(Feed, "put"):
            await link._receive(message)
        assert turns.calls.total() == 1000
        assert turns.most <= DELTAS_AT_ONCE


async def test_streams_that_are_given_up() -> None:
    async with linked() as link:
        with (turns := Turns()).watch(Feed, "on"):
            await link.give_up(NotServing("stopped"))
        assert turns.most <= AT_ONCE
        assert not link.feeds


async def test_a_stream_that_opens_while_others_are_followed_is_left_alone() -> None:
    async with linked() as link:
        linking = asyncio.ensure_future(link._linked())
        await asyncio.sleep(0)
        link.submit(pb.Submit(request_id="new"))
        await linking
        sent = [call.args[0] for call in link.scheduler.send.call_args_list]  # type: ignore[attr-defined]
        assert [message.submit.request_id for message in sent if message.HasField("submit")] == ["new"]


async def test_the_choices_of_one_body() -> None:
    async with door() as at:
        with (turns := Turns()).watch(Link, "submit"):
            task = at.asked(COMPLETION | {"n": 8})
            submits = [await at.link.accept() for _ in range(8)]
        assert (turns.calls.total(), turns.most) == (8, 1)
        for submit in submits:
            await at.say(submit, "a")
        await task


async def test_text_of_many_tokens() -> None:
    detokenizer = TextModel(model_info()).detokenizer(["!"])  # with a stop string each token is looked at
    tokens = ids("the") * 1000
    with (turns := Turns()).watch(type(detokenizer), "_push"):
        assert await detokenizer.push_in_turns(tokens) == "the" * 1000
    assert turns.most <= TOKENS_AT_ONCE


@pytest.mark.parametrize("messages", [validate.THREAD_ABOVE_MESSAGES, validate.THREAD_ABOVE_MESSAGES + 1])
async def test_a_chat_of_many_messages_is_rendered_in_a_thread(messages: int) -> None:
    request = inference_pb2.GenerateRequest()
    for _ in range(messages):
        request.chat.messages.add(role="user")
    model = TextModel(model_info(context_tokens=100_000))
    loop = asyncio.get_running_loop()
    with mock.patch.object(loop, "run_in_executor", wraps=loop.run_in_executor) as threads:
        await validate.encode_input(request, model, 1 << 20, asyncio.Semaphore(1))
    assert threads.called == (messages > validate.THREAD_ABOVE_MESSAGES)


async def test_the_lag_of_the_loop_is_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protos.metrics.LAG_EVERY_S", 0.0)
    metrics = Metrics()
    measuring = asyncio.ensure_future(measure_loop_lag(metrics.lag))

    async def measured() -> bool:
        return bool(metrics.registry.get_sample_value("laps_sd_event_loop_lag_seconds_count"))

    await until(measured)
    measuring.cancel()
