"""Checks of messages from workers and gateways, before anything is done with them: no peer may break what belongs to
others. Every function raises a RequestError that says what is wrong. No state lives here, and no decision.
"""

import math

from protos import version
from protos.channels import LINK_MESSAGE_BYTES
from protos.errors import BadInput
from protos.idempotence import ID_RULE, REQUEST_ID
from protos.link.v1 import gateway_link_pb2 as gateway_pb
from protos.link.v1 import worker_link_pb2 as worker_pb
from protos.v1 import types_pb2 as types_pb
from scheduler_service.reports import MAX_DRAFT

MAX_SLOTS = 1024
MAX_TOKENIZER_BYTES = LINK_MESSAGE_BYTES // 2  # the model goes to gateways in one message
MAX_COST_S = 1e4  # of each cost in a worker's profile
MIN_VERIFY_S = 1e-6
MAX_PLACEMENT = 1 << 31  # that a worker may hold a request under: each move counts one more, of 32 bits
MAX_SKEW_S = 24 * 3600  # between the clocks of two leaders
MAX_LOGIT_CHANGE = 100.0  # of penalties and bias: more changes no text, and far more would overflow
MAX_LOGPROBS = 20
MAX_SCORES = 32_768  # log-probabilities of a prompt
MAX_TIMEOUT_S = 1e9
_PRIORITIES = types_pb.Priority.values()


def hello(message: worker_pb.Hello) -> None:
    version.agree(message.min_protocol or message.protocol, message.protocol, "worker")
    for name in ("worker_id", "session"):
        if not getattr(message, name):
            raise BadInput(name, "must not be empty")
    if not 1 <= message.slots <= MAX_SLOTS:
        raise BadInput("slots", f"must be from 1 to {MAX_SLOTS}")
    if message.max_draft > MAX_DRAFT:
        raise BadInput("max_draft", f"must be at most {MAX_DRAFT}")
    for name in ("block_tokens", "blocks"):
        if not getattr(message, name):
            raise BadInput(name, "must be at least 1")
    if not message.model.fingerprint or not message.model.context_tokens:
        raise BadInput("model", "must have a fingerprint and a context")
    if message.tokenizer_bytes > MAX_TOKENIZER_BYTES:
        raise BadInput("tokenizer_bytes", f"must be at most {MAX_TOKENIZER_BYTES}")
    if any(held.placement > MAX_PLACEMENT for held in message.held):
        raise BadInput("held", f"a placement must be at most {MAX_PLACEMENT}")
    cost(message.cost)


def announcement(message: worker_pb.AnnounceRequest) -> None:
    version.agree(message.min_protocol or message.protocol, message.protocol, "worker")
    if not message.worker_id:
        raise BadInput("worker_id", "must not be empty")


def obeyed(epoch: int, now_s: float) -> None:
    """`epoch`: the highest one that a worker has obeyed. Leaders take epochs from their clocks."""
    if epoch > (now_s + MAX_SKEW_S) * 1000:
        raise BadInput("max_epoch", f"{epoch} is more than a day ahead of this clock")


def cost(message: worker_pb.CostProfile) -> None:
    for field, seconds in message.ListFields():
        if not 0 <= seconds <= MAX_COST_S:  # not NaN either: claims that are NaN have no order
            raise BadInput("cost", f"{field.name} of {seconds} s is no duration up to {MAX_COST_S:g} s")
    if message.verify_s < MIN_VERIFY_S:  # the service of a request is divided by it
        raise BadInput("cost", f"verify_s must be at least {MIN_VERIFY_S:g} s")


def submit(message: gateway_pb.Submit, context_tokens: int) -> None:
    if not REQUEST_ID.fullmatch(message.request_id):
        raise BadInput("request_id", ID_RULE)
    own, prompt = message.sampling, len(message.prompt)
    about_prompt = own.HasField("prompt_logprobs") or own.embedding
    for name, value in (("prompt", prompt), ("max_tokens", message.limits.max_tokens or about_prompt)):
        if not value:
            raise BadInput(name, "must not be empty")
    if (kind := message.priority) not in _PRIORITIES:
        raise BadInput("priority", f"{kind} is none of the priorities")
    if not 0 <= message.timeout_s <= MAX_TIMEOUT_S:
        raise BadInput("timeout_s", f"must be from 0 to {MAX_TIMEOUT_S:g}")
    if not 0 <= message.sampling.temperature < math.inf:
        raise BadInput("temperature", "must be a number from 0")
    if not 0 <= message.sampling.top_p <= 1:
        raise BadInput("top_p", "must be from 0 to 1")
    penalties = own.repetition_penalty, own.presence_penalty, own.frequency_penalty
    if not all(abs(value) <= MAX_LOGIT_CHANGE for value in (*penalties, *(entry.bias for entry in own.logit_bias))):
        raise BadInput("sampling", f"penalties and bias must be at most {MAX_LOGIT_CHANGE:g}")
    for name, alternatives in (("logprobs", own.logprobs), ("prompt_logprobs", own.prompt_logprobs)):
        if alternatives > MAX_LOGPROBS:
            raise BadInput(name, f"{alternatives} alternatives; at most {MAX_LOGPROBS}")
    if own.HasField("prompt_logprobs") and prompt * (own.prompt_logprobs + 1) > MAX_SCORES:
        raise BadInput("prompt_logprobs", f"{prompt} tokens are too many; at most {MAX_SCORES} values in all")
    if (tokens := prompt + max(1, message.limits.max_tokens)) > context_tokens:
        raise BadInput("max_tokens", f"prompt and output are {tokens} tokens, the context holds {context_tokens}")
