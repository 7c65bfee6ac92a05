"""Where inputs come in: every RPC, what sense looks like there, which statuses are an answer. No input is made here."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from protos import version
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as gateway_pb
from protos.link.v1 import worker_link_pb2 as worker_pb
from protos.oip import inference_pb2 as oip_pb
from protos.v1 import inference_pb2 as pb

TIMEOUT_S = 20.0
PER_STREAM = 16  # messages at most
_Code = grpc.StatusCode
_REFUSED = {_Code.OK, _Code.INVALID_ARGUMENT, _Code.NOT_FOUND, _Code.RESOURCE_EXHAUSTED}
# CANCELLED is the knocking client's own doing. So is DEADLINE_EXCEEDED, or the input's own time was up; and of a stream
# that the server ends while it still writes gRPC's client may hear nothing until its deadline.
_STREAMED = _REFUSED | {_Code.ALREADY_EXISTS, _Code.FAILED_PRECONDITION, _Code.DEADLINE_EXCEEDED, _Code.CANCELLED}

# Makes one call and returns it, ended.
Send = Callable[[grpc.aio.Channel, str, Sequence[bytes], Random], Awaitable[grpc.aio.Call]]


class Broken(Exception):
    """An answer that contradicts itself."""


async def _unary(channel: grpc.aio.Channel, method: str, raw: Sequence[bytes], random: Random) -> grpc.aio.Call:
    call = channel.unary_unary(method)(raw[0], timeout=TIMEOUT_S)
    await call.code()
    return call


async def _answer(channel: grpc.aio.Channel, method: str, raw: Sequence[bytes], random: Random) -> grpc.aio.Call:
    """Reads a stream of GenerateResponse, to its end or not, and checks that it is whole so far."""
    hurry = random.random()
    call = channel.unary_stream(method, response_deserializer=pb.GenerateResponse.FromString)(
        raw[0], timeout=random.choice((0.001, 0.01, 0.1)) if hurry < 0.1 else TIMEOUT_S
    )
    patience = random.randint(0, 3) if hurry > 0.7 else 10**6
    tokens, final, first = 0, False, True
    try:
        async for chunk in call:
            if final or (not first and chunk.offset != tokens):
                raise Broken(f"a chunk at {chunk.offset} after {tokens} tokens, final {final}")
            tokens, final, first = chunk.offset + len(chunk.token_ids), chunk.HasField("final"), False
            chunk.text.encode()
            if final and chunk.final.usage.completion_tokens != tokens:
                raise Broken(f"{chunk.final.usage.completion_tokens} tokens were told, {tokens} came")
            patience -= 1
            if patience <= 0:
                call.cancel()
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass
    if await call.code() is _Code.OK and not final:
        raise Broken("an answer without an end")
    return call


async def _stream(channel: grpc.aio.Channel, method: str, raw: Sequence[bytes], random: Random) -> grpc.aio.Call:
    """Says all of it, and hangs up: in order, or in the middle of the answer."""
    call = channel.stream_stream(method)(timeout=TIMEOUT_S, metadata=version.METADATA)
    try:
        for message in raw:
            await call.write(message)
        if random.random() < 0.2:
            call.cancel()
        else:
            await call.done_writing()
            async for _ in call:
                pass
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
        pass
    await call.code()
    return call


@dataclass(frozen=True)
class Door:
    """One RPC. `first`: what a stream of sense begins with; `share`: of all inputs."""

    method: str
    seeds: Sequence[Message]
    send: Send = _unary
    first: Message | None = None
    statuses: set[grpc.StatusCode] = field(default_factory=lambda: _REFUSED)
    share: float = 1.0

    @property
    def most(self) -> int:
        """Inputs that one call carries."""
        return PER_STREAM if self.send is _stream else 1

    @property
    def name(self) -> str:
        return self.method.rsplit(".", 1)[-1]


_IDS = ("one", "two", "three")
_SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "seed": 7}
_TENSORS = {
    "text_input": b"The quick",
    "sampling_parameters": b'{"max_tokens": "2", "temperature": 0.5, "stop": ["a"]}',
}
_INFERENCES = [
    oip_pb.ModelInferRequest(
        model_name="model",  # of the fuzzed stack
        id="one",
        inputs=[
            oip_pb.ModelInferRequest.InferInputTensor(
                name=name, datatype="BYTES", shape=[1], contents={"bytes_contents": [value]}
            )
            for name, value in _TENSORS.items()
        ],
    ),
    oip_pb.ModelInferRequest(
        model_name="model",
        parameters={"max_tokens": oip_pb.InferParameter(int64_param=2)},
        inputs=[
            oip_pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1]),
            oip_pb.ModelInferRequest.InferInputTensor(name="return_logprobs", datatype="BOOL", shape=[1]),
        ],
        raw_input_contents=[b"\3\0\0\0The", b"\1"],
    ),
]
STRANGERS = (
    Door(
        "/laps_sd.v1.Inference/Generate",
        (
            pb.GenerateRequest(prompt="The quick brown fox", max_tokens=2),
            pb.GenerateRequest(prompt="\U0001f469\u200d\U0001f469 é", max_tokens=3, stop=["a", "é"], request_id="one"),
            pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")]), max_tokens=2),
            pb.GenerateRequest(prompt="The", max_tokens=4, logit_bias={3: 1.0}, logprobs=2, **_SAMPLED),
            pb.GenerateRequest(
                prompt="A queue", max_tokens=4, repetition_penalty=1.1, presence_penalty=1, ignore_eos=True
            ),
        ),
        _answer,
        statuses=_STREAMED,
        share=5,
    ),
    Door(
        "/laps_sd.v1.Inference/Resume",
        [pb.ResumeRequest(request_id=id, offset=offset) for id in (*_IDS, "none") for offset in (0, 1)],
        _answer,
        statuses=_STREAMED | {_Code.OUT_OF_RANGE},  # an offset beyond the answer
        share=3,
    ),
    Door("/laps_sd.v1.Inference/Cancel", [pb.CancelRequest(request_id=id) for id in _IDS], share=2),
    Door("/laps_sd.v1.Inference/GetRequest", [pb.GetRequestRequest(request_id=id) for id in _IDS], share=2),
    Door("/laps_sd.v1.Inference/ListRequests", [pb.ListRequestsRequest(page_size=2, page_token="1")]),
    Door("/laps_sd.v1.Inference/Stats", [pb.StatsRequest()]),
    Door("/inference.GRPCInferenceService/ModelInfer", _INFERENCES, statuses=_STREAMED, share=2),
    Door("/inference.GRPCInferenceService/ModelStreamInfer", _INFERENCES, _stream, statuses=_STREAMED, share=2),
    Door("/inference.GRPCInferenceService/ModelConfig", [oip_pb.ModelConfigRequest(name="model")]),
    Door("/laps_sd.v1.Inference/ComparePolicies", [pb.ComparePoliciesRequest()]),
    Door("/grpc.health.v1.Health/Check", [health_pb2.HealthCheckRequest(service="laps_sd.v1.Inference")]),
    Door(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        [reflection_pb2.ServerReflectionRequest(list_services="")],
        _stream,
        statuses=_STREAMED,
    ),
)

_SUBMIT = gateway_pb.Submit(
    request_id="one",
    prompt=[5, 6, 7],
    sampling=common_pb.Sampling(**_SAMPLED),
    limits=common_pb.Limits(max_tokens=3, stop=["a"]),
    predicted_tokens=3,
)
_MODEL = common_pb.ModelInfo(name="m", fingerprint="f", context_tokens=1024, vocab_size=400)
_COST = worker_pb.CostProfile(draft_s=0.001, verify_s=0.001, prefill_token_s=1e-5)
_ROW = worker_pb.Row(request_id="one", placement=1, tokens=[5], drafted=1, accepted=1, blocks=1)


def peers(fingerprint: str) -> tuple[Door, ...]:
    """Of a scheduler whose workers serve the model of this fingerprint: what hurts there, a peer's mistake could do."""
    hello = worker_pb.Hello(
        protocol=version.CURRENT,
        worker_id="stray",
        session="s",
        model=_MODEL,
        slots=2,
        block_tokens=16,
        blocks=9,
        cost=_COST,
    )
    hello.model.fingerprint = fingerprint
    report = worker_pb.StepReport(epoch=1, session="s", step=1, command_seq=1, rows=[_ROW], free_blocks=8, cost=_COST)
    link = [
        gateway_pb.FromGateway(submit=_SUBMIT),
        gateway_pb.FromGateway(follow=gateway_pb.Follow(request_id="one", offset=1)),
        gateway_pb.FromGateway(follows=gateway_pb.Follows(follow=[gateway_pb.Follow(request_id="two")])),
        gateway_pb.FromGateway(cancel=gateway_pb.Cancel(request_id="one")),
    ]
    return (
        Door("/laps_sd.link.v1.GatewayLink/Link", link, _stream, statuses=_STREAMED, share=6),
        Door("/laps_sd.link.v1.GatewayLink/GetRequest", [pb.GetRequestRequest(request_id=id) for id in _IDS]),
        Door(
            "/laps_sd.link.v1.GatewayLink/GetSubmission",
            [gateway_pb.GetSubmissionRequest(request_id=id) for id in _IDS],
        ),
        Door("/laps_sd.link.v1.GatewayLink/ListRequests", [pb.ListRequestsRequest(page_size=2, page_token="1")]),
        Door("/laps_sd.link.v1.GatewayLink/Stats", [pb.StatsRequest()]),
        Door("/laps_sd.link.v1.GatewayLink/ComparePolicies", [pb.ComparePoliciesRequest()]),
        Door(
            "/laps_sd.link.v1.WorkerLink/Attach",
            [
                worker_pb.FromWorker(report=report),
                worker_pb.FromWorker(hello=hello),
                worker_pb.FromWorker(tokenizer_part=b"part"),
            ],
            _stream,
            first=worker_pb.FromWorker(hello=hello),
            statuses=_STREAMED,
            share=4,
        ),
    )
