"""Checks every field of a request, and makes of it what the scheduler gets. Each refusal is a BadInput that names the
field. Nothing is sent from here."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pydantic_core import from_json

from gateway.structure import Loosen, Structures
from gateway.text import BadChat, BadVariables, TextModel
from protos.errors import BadInput, ContextExceeded
from protos.idempotence import ID_RULE, REQUEST_ID
from protos.link.v1 import common_pb2, gateway_link_pb2
from protos.v1 import inference_pb2, types_pb2

ROLES = ("system", "user", "assistant")
MAX_MESSAGES = 1024  # of a chat; an empty message costs work too
MAX_VARIABLES_BYTES = 8192  # of JSON, for a chat template
MAX_STOPS = 8
MAX_STOP_CHARS = 128
MAX_BIASES = 300
MAX_LOGPROBS = 20
MAX_SCORES = 32_768  # log-probabilities of a prompt: for each token its own and the likeliest ones'
DEFAULT_MAX_TOKENS = 256
PRIORITIES = frozenset(types_pb2.Priority.values())
ON_DISCONNECT = frozenset(types_pb2.OnDisconnect.values())
THREAD_ABOVE_BYTES = 4096  # longer inputs are encoded in a thread; shorter ones take a millisecond or two
THREAD_ABOVE_MESSAGES = 64  # the same for chats, since the template's loop runs once for each message


async def submission(
    request: inference_pb2.GenerateRequest,
    model: TextModel,
    *,
    request_id: str = "",
    tenant: str,
    timeout_s: float,
    max_input_bytes: int,
    encoders: asyncio.Semaphore,
    structures: Structures,
    default_max_tokens: int | None = DEFAULT_MAX_TOKENS,
    loosen: Loosen | None = None,
    encoded: dict[str, list[int]] | None = None,
) -> gateway_link_pb2.Submit:
    """The submission of a request, under `request_id` unless it has an id itself, that may live `timeout_s` seconds.
    `encoders` bounds how many long inputs of the tenant are worked on at a time. `default_max_tokens`:
    None: as many as the context has room for. `loosen`: gives the structure that is tried where the request's is
    refused. `encoded`: tokens of this input by the model's digest; requests that have one input share it, so that it is
    encoded once. Raises BadInput; NotServing where `structures` does."""
    deadline = time.monotonic() + timeout_s
    check_fields(request, model.vocab_size)
    check_served(request, model)
    encoded = {} if encoded is None else encoded
    if model.digest not in encoded:
        encoded[model.digest] = await encode_input(request, model, max_input_bytes, encoders)
    prompt = encoded[model.digest]
    check_room(request.WhichOneof("input") or "", prompt, model.context_tokens)
    check_scores(request, len(prompt))
    if request.HasField("structure"):
        check = partial(structures.check, model=model, tenant=tenant)
        try:
            await check(request.structure)
        except BadInput:
            if loosen is None:
                raise
            request.structure.CopyFrom(await loosen(check))
            await check(request.structure)
    request_id = request.request_id or request_id or uuid.uuid4().hex
    submit = gateway_link_pb2.Submit(
        request_id=request_id,
        prompt=prompt,
        model_fingerprint=model.fingerprint,
        sampling=sampling(request, request_id),
        limits=limits(request, len(prompt), model.context_tokens, default_max_tokens),
        tenant=tenant,
        timeout_s=max(0.0, deadline - time.monotonic()),
        on_disconnect=request.on_disconnect or types_pb2.ON_DISCONNECT_CANCEL,
        input_digest=_digest(request),
        priority=request.priority or types_pb2.PRIORITY_DEFAULT,
    )
    if request.HasField("predicted_tokens"):
        submit.predicted_tokens = request.predicted_tokens
    return submit


def _digest(request: inference_pb2.GenerateRequest) -> bytes:
    """Equal for equal inputs, whatever the template makes of them: it may write today's date."""
    kind = request.WhichOneof("input") or ""
    given = getattr(request, kind, "")
    data = given.encode() if isinstance(given, str) else given.SerializeToString(deterministic=True)
    return hashlib.blake2b(data, digest_size=16, person=kind.encode()).digest()


def check_fields(request: inference_pb2.GenerateRequest, vocab_size: int) -> None:
    """Check what can be checked without the prompt's tokens. Comparisons are written so that NaN fails them."""
    if request.request_id and not REQUEST_ID.fullmatch(request.request_id):
        raise BadInput("request_id", ID_RULE)
    if request.HasField("temperature") and not 0 <= request.temperature <= 2:
        raise BadInput("temperature", f"must be in [0, 2], not {request.temperature:g}")
    if request.HasField("top_p") and not 0 < request.top_p <= 1:
        raise BadInput("top_p", f"must be in (0, 1], not {request.top_p:g}")
    if request.top_k > vocab_size:
        raise BadInput("top_k", f"{request.top_k} exceeds the vocabulary of {vocab_size}")
    check_counts(request)
    _check_logits(request, vocab_size)
    of_prompt = request.HasField("prompt_logprobs") or request.embedding
    if request.HasField("max_tokens") and request.max_tokens < 1 and not of_prompt:
        raise BadInput("max_tokens", "must be at least 1, unless something is asked of the prompt")
    if request.HasField("predicted_tokens") and request.predicted_tokens < 1:
        raise BadInput("predicted_tokens", "must be at least 1")
    if request.ignore_eos and request.HasField("structure"):
        raise BadInput("ignore_eos", "an output with a structure ends where the structure does; leave one of them out")
    if request.priority not in PRIORITIES:
        raise BadInput("priority", f"unknown value {request.priority}")
    if request.on_disconnect not in ON_DISCONNECT:
        raise BadInput("on_disconnect", f"unknown value {request.on_disconnect}")


def check_counts(request: inference_pb2.GenerateRequest) -> None:
    """A request has no more stop strings and biases than it may, and none too long. Raises BadInput."""
    if len(request.stop) > MAX_STOPS:
        raise BadInput("stop", f"{len(request.stop)} strings; at most {MAX_STOPS}")
    if not all(1 <= len(stop) <= MAX_STOP_CHARS for stop in request.stop):
        raise BadInput("stop", f"each string must have 1 to {MAX_STOP_CHARS} characters")
    if len(request.logit_bias) > MAX_BIASES:
        raise BadInput("logit_bias", f"{len(request.logit_bias)} tokens; at most {MAX_BIASES}")


def check_served(request: inference_pb2.GenerateRequest, model: TextModel) -> None:
    """Whether the engine can do what the request asks for."""
    for field, _ in request.ListFields():
        if reason := model.refused.get(field.name):
            raise BadInput(field.name, reason)


def _check_logits(request: inference_pb2.GenerateRequest, vocab_size: int) -> None:
    if request.HasField("repetition_penalty") and not 0.01 <= round(request.repetition_penalty, 6) <= 2:
        raise BadInput("repetition_penalty", f"must be in [0.01, 2], not {request.repetition_penalty:g}")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= (value := getattr(request, name)) <= 2:
            raise BadInput(name, f"must be in [-2, 2], not {value:g}")
    for token, value in request.logit_bias.items():
        if token >= vocab_size:
            raise BadInput("logit_bias", f"token {token} exceeds the vocabulary of {vocab_size}")
        if not -100 <= value <= 100:
            raise BadInput("logit_bias", f"must be in [-100, 100], not {value:g} for token {token}")
    for name in ("logprobs", "prompt_logprobs"):
        if (alternatives := getattr(request, name)) > MAX_LOGPROBS:
            raise BadInput(name, f"{alternatives} alternatives; at most {MAX_LOGPROBS}")


async def encode_input(
    request: inference_pb2.GenerateRequest,
    model: TextModel,
    max_bytes: int,
    encoders: asyncio.Semaphore,
    *,
    special: bool = True,
) -> list[int]:
    """The prompt's token ids; `special`: a text's with those that the tokenizer adds. A long input is encoded in a
    thread, so that no stream waits for it. Raises BadInput."""
    field = request.WhichOneof("input")
    if field is None:
        raise BadInput("input", "give one of prompt, chat and tokens")
    if len(request.chat.messages) > MAX_MESSAGES:
        raise BadInput("chat", f"{len(request.chat.messages)} messages; at most {MAX_MESSAGES}")
    if field == "tokens":
        check_room(field, request.tokens.ids, model.context_tokens)  # before anything looks at each of them
        return _known(field, request.tokens.ids, model.vocab_size)
    size = len(request.prompt.encode()) if field == "prompt" else request.chat.ByteSize()
    if size > max_bytes:
        raise BadInput(field, f"{size} bytes; at most {max_bytes}")
    if size > THREAD_ABOVE_BYTES or len(request.chat.messages) > THREAD_ABOVE_MESSAGES:
        return _known(field, await in_thread(encoders, _encode, request, model, special), model.vocab_size)
    return _known(field, _encode(request, model, special), model.vocab_size)


def _known(field: str, ids: Sequence[int], vocab_size: int) -> list[int]:
    """A tokenizer may have more tokens than the model has embeddings. Raises BadInput."""
    if (largest := max(ids, default=0)) >= vocab_size:
        what = "" if field == "tokens" else "its token "
        raise BadInput(field, f"{what}{largest} exceeds the vocabulary of {vocab_size}")
    return list(ids)


def check_room(field: str, prompt: Sequence[int], context_tokens: int) -> None:
    """Whether the prompt leaves room for an answer. Raises BadInput."""
    if not prompt:
        raise BadInput(field, "must not be empty")
    if len(prompt) >= context_tokens:
        problem = f"{len(prompt)} tokens leave no room for one more in the context of {context_tokens}"
        raise ContextExceeded(field, problem)


def check_scores(request: inference_pb2.GenerateRequest, tokens: int) -> None:
    """Whether the log-probabilities of a prompt of so many tokens are not too many. Raises BadInput."""
    each = request.prompt_logprobs + 1
    if request.HasField("prompt_logprobs") and tokens * each > MAX_SCORES:
        raise BadInput("prompt_logprobs", f"{tokens} tokens, {each} values each; at most {MAX_SCORES} values in all")


async def in_thread(encoders: asyncio.Semaphore, work: Callable[..., Any], *given: Any) -> Any:
    """What `work` makes of it. The encoder stays taken until its thread ends: nothing stops a thread, a client that
    hangs up neither."""
    await encoders.acquire()
    working = asyncio.get_running_loop().run_in_executor(None, work, *given)

    def over(done: asyncio.Future[Any]) -> None:
        encoders.release()
        done.exception()  # if the client is gone nobody hears of it, and asyncio must not log it

    working.add_done_callback(over)
    return await asyncio.shield(working)


def _encode(request: inference_pb2.GenerateRequest, model: TextModel, special: bool) -> list[int]:
    if request.WhichOneof("input") == "prompt":
        if not request.prompt:
            raise BadInput("prompt", "must not be empty")
        return model.encode_prompt(request.prompt, special=special)
    messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
    if not messages:
        raise BadInput("chat", "must have at least one message")
    for number, message in enumerate(messages):
        if message["role"] not in ROLES:
            role = message["role"][:32]
            raise BadInput("chat", f"unknown role {role!r} of message {number}; known are {', '.join(ROLES)}")
    chat = request.chat
    if chat.continue_final_message and chat.add_generation_prompt:
        raise BadInput("chat.continue_final_message", "not together with add_generation_prompt")
    asks = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message
    try:
        return model.encode_chat(
            messages, _variables(chat), generation_prompt=asks, continues=chat.continue_final_message
        )
    except BadVariables as error:
        raise BadInput("chat.template_kwargs", str(error)) from error
    except BadChat as error:
        raise BadInput("chat", str(error)) from error


def _variables(chat: inference_pb2.Chat) -> dict[str, Any]:
    """Those that the client has for the template. Raises BadInput."""
    if len(chat.template_kwargs.encode()) > MAX_VARIABLES_BYTES:
        raise BadInput("chat.template_kwargs", f"more than {MAX_VARIABLES_BYTES} bytes")
    try:
        variables = from_json(chat.template_kwargs or "{}", allow_inf_nan=False)
    except ValueError:
        variables = None
    if not isinstance(variables, dict):
        raise BadInput("chat.template_kwargs", "must be a JSON object")
    return variables


def limits(
    request: inference_pb2.GenerateRequest,
    prompt_tokens: int,
    context_tokens: int,
    default_max_tokens: int | None = DEFAULT_MAX_TOKENS,
) -> common_pb2.Limits:
    """An explicit max_tokens must fit into the context beside the prompt; the default takes what there is room for."""
    room = context_tokens - prompt_tokens
    default = room if default_max_tokens is None else min(default_max_tokens, room)
    max_tokens = request.max_tokens if request.HasField("max_tokens") else default
    if max_tokens > room:
        raise ContextExceeded(
            "max_tokens",
            f"prompt of {prompt_tokens} tokens + max_tokens {max_tokens} exceeds the context of {context_tokens}; "
            f"at most {room}",
        )
    if request.min_tokens > max_tokens:
        raise BadInput("min_tokens", f"{request.min_tokens} exceeds max_tokens {max_tokens}")
    return common_pb2.Limits(
        max_tokens=max_tokens, min_tokens=request.min_tokens, stop=request.stop, ignore_eos=request.ignore_eos
    )


def sampling(request: inference_pb2.GenerateRequest, request_id: str) -> common_pb2.Sampling:
    """A request without a seed gets one that follows from its id: if it is sent again, it is still the same request."""
    drawn = int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest()) >> 1
    return common_pb2.Sampling(
        temperature=request.temperature,
        top_p=request.top_p if request.HasField("top_p") else 1.0,
        top_k=request.top_k,
        seed=request.seed if request.HasField("seed") else drawn,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=[common_pb2.LogitBias(token=token, bias=bias) for token, bias in sorted(request.logit_bias.items())],
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        structure=request.structure if request.HasField("structure") else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        embedding=request.embedding,
    )
