"""A body to the requests that answer it, one for each choice, and to what their answers are to be rendered with. Pure:
nothing is encoded and nothing is sent here."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from gateway.http.errors import Unsupported
from gateway.openai import formats, tools
from gateway.openai.fields import MAX_ANSWERS, UINT32, Chat, Completion, Generation, Message, Part, Rendered
from gateway.structure import Loosen, check_sizes
from gateway.text import ALL, Takes
from gateway.validate import ROLES, check_counts, check_room
from protos.errors import BadInput
from protos.idempotence import MOST_ID_CHARS, REQUEST_ID
from protos.v1 import types_pb2
from protos.v1.inference_pb2 import Chat as Messages
from protos.v1.inference_pb2 import ChatMessage, GenerateRequest, TokenIds

COMPLETION_TOKENS = 16  # OpenAI's and vLLM's default for completions; a chat's answer may fill the context
_ROLES = {"developer": "system"}  # roles that are others' second name
_KNOWN = (*ROLES, *_ROLES, "tool")
CLASSES = {
    "interactive": types_pb2.PRIORITY_INTERACTIVE,
    "default": types_pb2.PRIORITY_DEFAULT,
    "batch": types_pb2.PRIORITY_BATCH,
}
# HTTP's names of gRPC's fields of a conversation.
CHAT_NAMES = {
    "chat": "messages",
    "chat.template_kwargs": "chat_template_kwargs",
    "chat.continue_final_message": "continue_final_message",
}
NO_NAMES: Mapping[str, str] = {}
DISCONNECT = {"cancel": types_pb2.ON_DISCONNECT_CANCEL, "detach": types_pb2.ON_DISCONNECT_DETACH}


@dataclass(frozen=True, slots=True)
class Asked:
    """`requests`: so many `choices` of the first prompt, then of the next. `echo`: the prompts, if they go before the
    answers. `may`: what each answer may call. `loosen`: as in validate.submission. `prompt_logprobs`: those of the
    prompt stand by themselves, not before those of the answer. `names`: HTTP's names of gRPC's fields."""

    request_id: str
    model: str
    chat: bool
    requests: tuple[GenerateRequest, ...]
    choices: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: tuple[str | list[int], ...] = ()
    may: tools.MayCall = tools.NOTHING
    loosen: Loosen | None = None
    prompt_logprobs: bool = False
    timeout_s: float | None = None
    detached: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    def under(self, request_id: str) -> "Asked":
        """The same under another id."""
        for request in self.requests:
            request.request_id = request_id + request.request_id.removeprefix(self.request_id)
        return replace(self, request_id=request_id)

    def renamed(self, error: BadInput) -> BadInput:
        """The same error, in the names of this door."""
        name = self.names.get(error.field) or self.names.get(error.field.partition(".")[0], error.field)
        return type(error)(name, error.problem)


def of_chat(body: Chat, request_id: str, takes: Takes = ALL, names: Mapping[str, str] = NO_NAMES) -> Asked:
    """`request_id`: the id, unless the body has one. `takes`: what the model's template does. `names`: of fields that
    the client knows by others. Raises BadInput."""
    if body.top_logprobs is not None and not body.logprobs:
        raise BadInput("top_logprobs", "needs logprobs")
    may = tools.callable_in(body)
    chat = conversation(body, messages(body.messages, tools.told(may), takes))
    return _asked(
        body,
        request_id,
        [GenerateRequest(chat=chat)],
        chat=True,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        may=may,
        names=names,
    )


def of_completion(body: Completion, request_id: str, context_tokens: int) -> Asked:
    """`request_id`: the id, unless the body has one. `context_tokens`: longer prompts of tokens are not copied for each
    choice, but refused. Raises BadInput."""
    echoed = body.logprobs if body.echo else None
    if echoed is not None and body.prompt_logprobs is not None:
        raise BadInput("prompt_logprobs", "not with echo and logprobs: they tell the same")
    prompts = inputs("prompt", body.prompt)
    if len(prompts) * body.n > MAX_ANSWERS:
        raise BadInput("prompt", f"{len(prompts)} prompts, each with {body.n} choices; at most {MAX_ANSWERS} in all")
    for each in prompts:
        if not isinstance(each, str):
            check_room("prompt", each, context_tokens)
    return _asked(
        body,
        request_id,
        list(map(of_input, prompts)),
        chat=False,
        logprobs=body.logprobs,
        echoed=echoed,
        echo=tuple(prompts) if body.echo else (),
    )


def _asked(
    body: Generation,
    request_id: str,
    given: Sequence[GenerateRequest],
    *,
    chat: bool,
    logprobs: int | None,
    echoed: int | None = None,
    echo: tuple[str | list[int], ...] = (),
    may: tools.MayCall = tools.NOTHING,
    names: Mapping[str, str] = NO_NAMES,
) -> Asked:
    if body.stream_options is not None and not body.stream:
        raise BadInput("stream_options", "only with stream")
    request_id = body.request_id or request_id
    structure, structure_field = formats.structure(body, may)
    structure_field = names.get(structure_field, structure_field)
    first = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    common = GenerateRequest(
        max_tokens=_max_tokens(body, chat=chat),
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(0, body.top_k),
        stop=[body.stop] if isinstance(body.stop, str) else body.stop,
        ignore_eos=body.ignore_eos,
        predicted_tokens=body.predicted_tokens,
        priority=CLASSES[body.class_],
        on_disconnect=DISCONNECT[body.on_disconnect],
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_biases(body.logit_bias),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs if echoed is None else echoed,
        structure=structure,
    )
    # Before it is copied for each answer.
    check_counts(common)
    if structure is not None:
        check_sizes(structure_field, structure)
    requests: list[GenerateRequest] = []
    alone = len(given) * body.n == 1
    for each in given:
        for choice in range(body.n):
            request = GenerateRequest()
            request.CopyFrom(each)
            request.MergeFrom(common)
            request.request_id = request_id if alone else id_of(len(requests), request_id)
            if body.seed is not None:
                request.seed = _seed(body.seed, choice)
            requests.append(request)
    options = body.stream_options
    return Asked(
        request_id=request_id,
        model=body.model,
        chat=chat,
        requests=tuple(requests),
        choices=body.n,
        stream=body.stream,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
        echo=echo,
        may=may,
        loosen=partial(formats.loosened, body, may) if may.functions else None,
        prompt_logprobs=body.prompt_logprobs is not None,
        timeout_s=body.timeout_s,
        detached=body.on_disconnect == "detach",
        names={
            **CHAT_NAMES,
            "tokens": "prompt",
            "input": "prompt",
            "max_tokens": first,
            "priority": "class",
            "logprobs": "top_logprobs" if chat else "logprobs",
            "prompt_logprobs": "prompt_logprobs" if echoed is None else "logprobs",
            "structure": structure_field,
            **names,
        },
    )


def id_of(answer: int, request_id: str) -> str:
    """The id of one of several answers: the body's, and which it is. Where that is longer than an id may be, a digest
    stands for the end of the body's."""
    id = f"{request_id}-{answer}"
    if len(id) <= MOST_ID_CHARS or not REQUEST_ID.fullmatch(request_id):
        return id
    digest = hashlib.blake2b(request_id.encode(), digest_size=16).hexdigest()
    return f"{request_id[: MOST_ID_CHARS - 40]}-{digest}-{answer}"


def _max_tokens(body: Generation, *, chat: bool) -> int | None:
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return given if given is not None or chat else COMPLETION_TOKENS


def conversation(how: Rendered, said: Sequence[ChatMessage]) -> Messages:
    variables = json.dumps(how.chat_template_kwargs, ensure_ascii=False) if how.chat_template_kwargs else ""
    return Messages(
        messages=said,
        template_kwargs=variables,
        add_generation_prompt=how.add_generation_prompt,
        continue_final_message=how.continue_final_message,
    )


def messages(given: Sequence[Message], told: str = "", takes: Takes = ALL) -> list[ChatMessage]:
    """`told`: what the system message says further; where the template takes none the user's first message begins with
    it. What came of several calls is one message: many templates want user and assistant in turn. Where they insist,
    what the user says next is in that message, too. Raises BadInput."""
    merged: list[tuple[str, list[str]]] = []
    for number, each in enumerate(given):
        role, text = _message(number, each)
        behind_tool = number and given[number - 1].role == "tool"
        if behind_tool and (each.role == "tool" or (each.role == "user" and not takes.users)):
            merged[-1][1].append(text)
        else:
            merged.append((role, [text]))
    made = [ChatMessage(role=role, content="\n\n".join(texts)) for role, texts in merged]
    if not told:
        return made
    role = "system" if takes.system else "user"
    first = next((each for each in (made[:1] if takes.system else made) if each.role == role), None)
    if first is None:
        return [ChatMessage(role=role, content=told), *made]
    first.content = f"{first.content}\n\n{told}" if takes.system else f"{told}\n\n{first.content}"
    return made


def _message(number: int, message: Message) -> tuple[str, str]:
    """The role and the text that a template gets. Raises BadInput."""
    field = f"messages[{number}]"
    if message.role == "function":
        raise Unsupported(f"{field}.role", "function is not supported: send tool")
    if message.role not in _KNOWN:
        raise BadInput(f"{field}.role", f"unknown role {message.role[:32]!r}; known are {', '.join(_KNOWN)}")
    calls = message.tool_calls if message.role == "assistant" else []
    if message.content is None and not calls:
        raise BadInput(f"{field}.content", "missing")
    text = _text(field, message.content or "")
    if message.role == "tool":
        return "user", tools.result(text)
    return _ROLES.get(message.role, message.role), text + "".join(map(tools.written, calls))


def _text(field: str, content: str | list[Part]) -> str:
    """Parts are joined: they are one text, cut by the client. Raises BadInput."""
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type != "text":
            raise Unsupported(f"{field}.content[{i}].type", "must be text: the model reads nothing else")
        if part.text is None:
            raise BadInput(f"{field}.content[{i}].text", "missing")
    return "".join(part.text or "" for part in content)


def inputs(field: str, given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Each a text, or tokens. Raises BadInput."""
    if not given:
        raise BadInput(field, "must not be empty")
    return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


def of_input(given: str | list[int]) -> GenerateRequest:
    """A request that says nothing else."""
    return GenerateRequest(prompt=given) if isinstance(given, str) else GenerateRequest(tokens=TokenIds(ids=given))


def _biases(given: dict[str, float]) -> dict[int, float]:
    """JSON has only strings for names. Raises BadInput."""
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) < 11 and int(token) <= UINT32):
            raise BadInput("logit_bias", "names must be token ids")
    return {int(token): bias for token, bias in given.items()}


def _seed(seed: int, choice: int) -> int:
    """An int64 as the uint64 with the same bits. The first choice has the seed itself; each further one its own, that
    follows from both."""
    bits = seed % 2**64
    if not choice:
        return bits
    return int.from_bytes(hashlib.blake2b(f"{bits}/{choice}".encode(), digest_size=8).digest())
