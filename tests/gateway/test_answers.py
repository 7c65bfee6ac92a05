"""The scheduler names a request by its id when it accepts or refuses it: which submission it means must be certain."""

import asyncio

import grpc
import pytest

from gateway.link import Link
from protos.errors import NotServing
from protos.link.v1 import gateway_link_pb2 as pb
from protos.tls import Tls


def linked() -> tuple[Link, "asyncio.Queue[pb.FromGateway]"]:
    """A link that is up, and what it sends."""

    async def on_ready() -> None:
        pass

    link = Link(["127.0.0.1:1"], Tls(), max_requests=9, reconnect_timeout_s=9, rpc_timeout_s=9, on_ready=on_ready)
    sent = link.scheduler._upward = asyncio.Queue(9)
    return link, sent


async def test_streams_of_one_request_wait_for_one_answer() -> None:
    """A second one might come when the id is another request's, which would get the tokens of this one."""
    link, sent = linked()
    submit = pb.Submit(request_id="a", prompt=[1])
    first, second = link.submit(submit), link.submit(submit)
    assert sent.qsize() == 1
    await link._receive(pb.ToGateway(accepted=["a"]))
    assert (first.life.accepted, second.life.accepted) == (True, True)


async def test_one_that_is_refused_for_now_is_sent_again() -> None:
    link, sent = linked()
    link.submit(pb.Submit(request_id="a", prompt=[1]))
    code = grpc.StatusCode.UNAVAILABLE.value[0]
    await link._receive(pb.ToGateway(refusals=[pb.Refusal(request_id="a", code=code)]))
    link.submit(pb.Submit(request_id="a", prompt=[1]))
    assert sent.qsize() == 2


async def test_another_request_waits_until_the_one_before_is_answered() -> None:
    link, _ = linked()
    link.submit(pb.Submit(request_id="a", prompt=[1]))
    await link.give_up(NotServing("try again"))
    with pytest.raises(NotServing, match="not answered yet"):
        link.submit(pb.Submit(request_id="a", prompt=[2]))
    await link._receive(pb.ToGateway(accepted=["a"]))
    assert not link.submit(pb.Submit(request_id="a", prompt=[2])).life.accepted
