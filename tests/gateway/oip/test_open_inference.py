"""The Open Inference Protocol over real gRPC, against a scripted scheduler. Triton's own client is asked in
tests/doors."""

import asyncio
import json
import re
import struct
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest

from gateway.front import Front
from gateway.oip.request import understand
from gateway.oip.service import MOST_AT_ONCE, MOST_NAME_CHARS, OpenInference
from gateway.text import TextModel
from protos.errors import BadInput, NotServing
from protos.oip import inference_pb2 as pb
from protos.oip import inference_pb2_grpc
from protos.v1 import types_pb2
from tests.gateway.harness import WAIT_S, Link, Scheduler, ending, ids, stack
from tests.waiting import until

PROMPT = "the quick"


def ask(
    text: str = PROMPT, id: str = "", parameters: dict[str, Any] | None = None, **inputs: Any
) -> pb.ModelInferRequest:
    """An inference whose inputs are BYTES or BOOL by their Python type."""
    request = pb.ModelInferRequest(model_name="tiny", id=id)
    for name, value in {"text_input": text, **inputs}.items():
        given = request.inputs.add(name=name, shape=[1])
        if isinstance(value, bool):
            given.datatype = "BOOL"
            given.contents.bool_contents.append(value)
        else:
            given.datatype = "BYTES"
            given.contents.bytes_contents.append(value.encode())
    for name, value in (parameters or {}).items():
        kind = {str: "string_param", bool: "bool_param", int: "int64_param", float: "double_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


def sampling(**fields: Any) -> str:
    return json.dumps(fields)


def texts(response: pb.ModelInferResponse) -> dict[str, Any]:
    """The outputs by name: text, or a number."""
    values: dict[str, Any] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        values[output.name] = raw[4:].decode() if output.datatype == "BYTES" else struct.unpack("<I", raw)[0]
    return values


@asynccontextmanager
async def door(**settings: Any) -> AsyncIterator[tuple[Scheduler, Link, inference_pb2_grpc.GRPCInferenceServiceStub]]:
    async with stack(**settings) as (scheduler, link, client):
        yield scheduler, link, inference_pb2_grpc.GRPCInferenceServiceStub(client._to(0).channel)


async def test_the_server_and_its_model_tell_what_they_are() -> None:
    async with door() as (_, _, stub):
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert (await stub.ModelReady(pb.ModelReadyRequest(name="tiny"))).ready
        assert (await stub.ServerMetadata(pb.ServerMetadataRequest())).name == "laps-sd"
        metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny", version="1"))
        assert {"text_input", "sampling_parameters"} <= {tensor.name for tensor in metadata.inputs}
        config = (await stub.ModelConfig(pb.ModelConfigRequest(name="tiny"))).config
        assert config.model_transaction_policy.decoupled
        with pytest.raises(grpc.aio.AioRpcError, match="'other' version '' is not served; 'tiny' is"):
            await stub.ModelMetadata(pb.ModelMetadataRequest(name="other"))


async def test_a_call_that_nobody_serves_is_unimplemented() -> None:
    async with stack() as (_, _, client):
        call = client._to(0).channel.unary_unary("/inference.GRPCInferenceService/ModelStatistics")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"", timeout=WAIT_S)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_one_inference_is_answered_whole_with_its_prompt_in_front() -> None:
    async with door() as (_, link, stub):
        answer = asyncio.ensure_future(
            stub.ModelInfer(
                ask(id="7", return_finish_reason=True, return_num_input_tokens=True, return_num_output_tokens=True)
            )
        )
        submit = await link.accept()
        assert submit.sampling.temperature == 1
        await link.delta(submit, 0, ids(" fox"))
        await link.delta(submit, len(ids(" fox")), ids(" jumps"), ending=ending(types_pb2.FINISH_REASON_LENGTH))
        response = await asyncio.wait_for(answer, WAIT_S)
        assert (response.id, response.parameters["triton_final_response"].bool_param) == ("7", True)
        assert texts(response) == {
            "text_output": "the quick fox jumps",
            "finish_reason": "length",
            "num_input_tokens": len(submit.prompt),
            "num_output_tokens": len(ids(" fox") + ids(" jumps")),
        }


async def test_a_stream_brings_the_answers_of_several_requests_and_errors_by_id_and_lives_on() -> None:
    async with door() as (_, link, stub):
        call = stub.ModelStreamInfer()
        await call.write(ask("the", id="a", stream=True))
        first = await link.accept()
        await call.write(ask("fox", id="b", stream=True, sampling_parameters=sampling(temperature="hot")))
        wrong = await call.read()
        assert wrong.error_message.startswith("INVALID_ARGUMENT: sampling_parameters.temperature: must be a number")
        assert wrong.infer_response.id == "b"
        await call.write(ask("dog", id="c", stream=True))
        second = await link.accept()
        await link.delta(second, 0, ids(" end"), ending=ending())
        last = (await call.read()).infer_response
        assert (last.id, texts(last), last.parameters["triton_final_response"].bool_param) == (
            "c",
            {"text_output": " end"},
            True,
        )
        await link.delta(first, 0, ids(" lazy"))
        part = (await call.read()).infer_response
        assert (part.id, texts(part), part.parameters["triton_final_response"].bool_param) == (
            "a",
            {"text_output": " lazy"},
            False,
        )
        await call.done_writing()  # what was asked for is still answered
        await link.delta(first, len(ids(" lazy")), ids(" dog"), ending=ending())
        assert texts((await call.read()).infer_response) == {"text_output": " dog"}
        assert await call.read() is grpc.aio.EOF


async def test_hanging_up_cancels_every_request_of_a_stream() -> None:
    async with door() as (_, link, stub):
        call = stub.ModelStreamInfer()
        for id in ("a", "b"):
            await call.write(ask("the", id=id, stream=True))
        submitted = {(await link.accept()).request_id for _ in range(2)}
        call.cancel()
        assert {(await link.next("cancel")).request_id for _ in range(2)} == submitted


async def test_a_model_is_not_ready_while_none_is_served() -> None:
    served = OpenInference(cast(Front, Draining()), WAIT_S)
    assert not (await served.ModelReady(pb.ModelReadyRequest(name="tiny"), None)).ready


class Draining:
    def models(self) -> dict[str, TextModel]:
        raise NotServing("draining")


class Unread:
    """A stream whose client sends one request after another, and reads nothing until `reads` is set."""

    def __init__(self, requests: int) -> None:
        self.left, self.written, self.reads = requests, 0, asyncio.Event()
        self.taken: list[pb.ModelInferRequest] = []

    async def __aiter__(self) -> AsyncIterator[pb.ModelInferRequest]:
        while self.left:
            self.left -= 1
            self.taken.append(ask())
            yield self.taken[-1]

    async def write(self, _: object) -> None:
        await self.reads.wait()
        self.written += 1

    def time_remaining(self) -> None:
        return None


class NoModels:
    def models(self) -> dict[str, TextModel]:
        return {}


async def test_requests_of_a_client_that_reads_nothing_are_not_taken_without_bound() -> None:
    stream = Unread(MOST_AT_ONCE + 9)
    served = OpenInference(cast(Front, NoModels()), WAIT_S)
    call = asyncio.create_task(served.ModelStreamInfer(aiter(stream), stream))
    for _ in range(2 * MOST_AT_ONCE):  # turns of the loop: nothing else would stop it
        await asyncio.sleep(0)
    assert stream.left == 8  # one is taken, and waits for a place
    fresh = [ask()]
    kept = {sys.getrefcount(each) for each in stream.taken[:-1]}
    assert kept == {sys.getrefcount(each) for each in fresh[:]}  # nobody holds them: only their errors are kept
    stream.reads.set()
    await asyncio.wait_for(call, WAIT_S)
    assert (stream.left, stream.written) == (0, MOST_AT_ONCE + 9)


async def test_a_stream_whose_client_goes_on_reading_nothing_ends_and_so_do_its_requests() -> None:
    async with door(stalled_s=0.1, context_tokens=100_000, max_unread_tokens=10**6) as (_, link, stub):
        call = stub.ModelStreamInfer()
        for id in ("a", "b"):
            asked = sampling(logprobs=20, max_tokens=90_000)
            await call.write(ask("the", id=id, stream=True, return_logprobs=True, sampling_parameters=asked))
        read, quiet = await link.accept(), await link.accept()
        likeliest = types_pb2.Logprob(logprob=-0.5, top_tokens=range(20), top_logprobs=[-1.0] * 20)
        sent = 0

        async def left() -> bool:
            nonlocal sent
            await link.delta(read, sent, [40] * 400, logprobs={"tokens": [likeliest] * 400})
            sent += 400
            return link.received.qsize() == 2

        await until(left)
        assert {(await link.next("cancel")).request_id for _ in range(2)} == {read.request_id, quiet.request_id}
        with pytest.raises(grpc.aio.AioRpcError, match=r"nothing was read for 0\.1 s") as cut:
            async for _ in call:
                pass
        assert cut.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_long_id_is_refused_and_not_repeated() -> None:
    async with door() as (_, _, stub):
        call = stub.ModelStreamInfer()
        await call.write(ask("the", id="a" * 100_000, stream=True))
        wrong = await call.read()
        assert wrong.error_message.startswith("INVALID_ARGUMENT: id: 100000 characters; at most")
        assert wrong.infer_response.id == "a" * MOST_NAME_CHARS


async def test_a_cancelled_answer_is_an_error_and_never_a_whole_text() -> None:
    async with door() as (_, link, stub):
        answer = asyncio.ensure_future(stub.ModelInfer(ask()))
        submit = await link.accept()
        await link.delta(submit, 0, ids(" fox"), ending=ending(types_pb2.FINISH_REASON_CANCELLED))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await asyncio.wait_for(answer, WAIT_S)
        assert error.value.code() is grpc.StatusCode.CANCELLED


async def test_an_empty_prompt_is_told_by_the_name_of_its_tensor() -> None:
    async with door() as (_, _, stub):
        with pytest.raises(grpc.aio.AioRpcError, match="text_input: must not be empty"):
            await stub.ModelInfer(ask(""))


async def test_log_probabilities_come_by_token_id() -> None:
    async with door() as (_, link, stub):
        answer = asyncio.ensure_future(
            stub.ModelInfer(ask(return_logprobs=True, sampling_parameters=sampling(logprobs=2)))
        )
        submit = await link.accept()
        assert submit.sampling.logprobs == 2
        (token,) = ids("e")
        logprob = types_pb2.Logprob(logprob=-0.5, top_tokens=[token, 9], top_logprobs=[-0.5, -2])
        await link.delta(submit, 0, [token], logprobs={"tokens": [logprob]}, ending=ending())
        (told,) = json.loads(texts(await asyncio.wait_for(answer, WAIT_S))["logprobs"])
        assert told[str(token)] == {"logprob": -0.5, "rank": 1, "decoded_token": "e"}
        assert told["9"]["rank"] == 2


@pytest.mark.parametrize("wanted", [True, False])
async def test_each_token_of_log_probabilities_is_made_text_once_and_only_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    made = Counter[int]()

    def decode(model: TextModel, token_ids: Sequence[int], **_: bool) -> str:
        made.update(token_ids)
        return ""

    monkeypatch.setattr(TextModel, "decode", decode)
    async with door() as (_, link, stub):
        answer = asyncio.ensure_future(
            stub.ModelInfer(ask(return_logprobs=wanted, sampling_parameters=sampling(logprobs=20)))
        )
        submit = await link.accept()
        likeliest = types_pb2.Logprob(logprob=-0.5, top_tokens=range(20), top_logprobs=[-1.0] * 20)
        for at in range(5):
            await link.delta(submit, at, [7], logprobs={"tokens": [likeliest]})
        await link.delta(submit, 5, ending=ending())
        await asyncio.wait_for(answer, WAIT_S)
    assert made == (Counter(range(20)) if wanted else Counter())


async def test_an_answer_that_no_message_holds_is_refused_in_words_and_its_stream_goes_on() -> None:
    tokens = 5000
    asked = ask(return_logprobs=True, sampling_parameters=sampling(logprobs=20, max_tokens=tokens))
    likeliest = types_pb2.Logprob(logprob=-0.5, top_tokens=range(100, 120), top_logprobs=[-1.0] * 20)

    async def say(link: Link) -> None:
        submit = await link.accept()
        said = {"tokens": [likeliest] * tokens}
        await link.delta(submit, 0, [40] * tokens, logprobs=said, ending=ending())

    problem = "stream: [0-9]+ bytes of answer, and a message has at most 4194240: ModelStreamInfer with stream"
    async with door(context_tokens=100_000, max_unread_tokens=10**6) as (_, link, stub):
        whole = asyncio.ensure_future(stub.ModelInfer(asked))
        await say(link)
        with pytest.raises(grpc.aio.AioRpcError, match=problem) as refused:
            await asyncio.wait_for(whole, WAIT_S)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        call = stub.ModelStreamInfer()
        await call.write(asked)
        await say(link)
        assert re.search(problem, (await asyncio.wait_for(call.read(), WAIT_S)).error_message)
        await call.write(ask("dog", stream=True))
        await link.delta(await link.accept(), 0, ids(" end"), ending=ending())
        assert texts((await asyncio.wait_for(call.read(), WAIT_S)).infer_response) == {"text_output": " end"}
        call.cancel()


def test_a_number_may_be_a_string_and_a_tensor_wins_over_a_parameter() -> None:
    asked = understand(
        ask(
            sampling_parameters=sampling(temperature="0.5", top_k=-1, stop="end", seed="-1", n="1"),
            parameters={"temperature": "2", "max_tokens": "7", "sequence_id": 4, "timeout": 2_000_000},
        )
    )
    generate = asked.request
    assert (generate.temperature, generate.max_tokens, generate.top_k, list(generate.stop)) == (0.5, 7, 0, ["end"])
    assert (generate.seed, asked.timeout_s) == (2**64 - 1, 2)


def test_raw_contents_are_read_as_triton_sends_them() -> None:
    request = pb.ModelInferRequest(model_name="tiny")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.inputs.add(name="stream", datatype="BOOL", shape=[1])
    request.raw_input_contents.extend([struct.pack("<I", 3) + b"the", b"\1"])
    asked = understand(request)
    assert (asked.request.prompt, asked.stream) == ("the", True)
    request.raw_input_contents[0] = struct.pack("<I", 4) + b"the"
    with pytest.raises(BadInput, match="text_input: its raw contents are not one element of BYTES"):
        understand(request)


WRONG: list[tuple[pb.ModelInferRequest, str]] = [
    (pb.ModelInferRequest(), "text_input: missing"),
    (ask(image="x"), "image: unknown input"),
    (ask(sampling_parameters="{"), "sampling_parameters: no JSON"),
    (ask(sampling_parameters="[" * 100_000), "sampling_parameters: no JSON"),
    (ask(sampling_parameters="[]"), "sampling_parameters: must be a JSON object"),
    (ask(sampling_parameters=sampling(best_of=2)), "sampling_parameters.best_of: unknown"),
    (ask(sampling_parameters=sampling(max_tokens=1.5)), "sampling_parameters.max_tokens: must be a whole number"),
    (ask(sampling_parameters=sampling(max_tokens=True)), "sampling_parameters.max_tokens: must be a whole number"),
    (ask(sampling_parameters=sampling(max_tokens=2**40)), "sampling_parameters.max_tokens: must be in"),
    (ask(sampling_parameters='{"temperature": NaN}'), "sampling_parameters.temperature: must be"),
    (ask(sampling_parameters='{"max_tokens": Infinity}'), "sampling_parameters.max_tokens: must be a whole number"),
    (ask(sampling_parameters='{"stop": "\\ud800"}'), "sampling_parameters: no JSON"),
    (ask(sampling_parameters='{"\\ud800": 1}'), "sampling_parameters: no JSON"),
    (ask(sampling_parameters='{"class": []}'), "sampling_parameters.class: must be one of"),
    (ask(sampling_parameters='{"class": {}}'), "sampling_parameters.class: must be one of"),
    (ask(sampling_parameters=sampling(n=2)), "sampling_parameters.n: one answer a request"),
    (ask(sampling_parameters=sampling(ignore_eos="maybe")), "sampling_parameters.ignore_eos: must be true or false"),
    (ask(stream=True, exclude_input_in_output=False), "exclude_input_in_output: a stream never repeats its input"),
    (ask(parameters={"timeout": -1}), "timeout: must be in"),
]


@pytest.mark.parametrize(("request_", "problem"), WRONG, ids=[problem for _, problem in WRONG])
def test_bad_input_names_its_tensor(request_: pb.ModelInferRequest, problem: str) -> None:
    with pytest.raises(BadInput) as error:
        understand(request_)
    assert error.value.message.startswith(problem)
