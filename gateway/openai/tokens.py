"""POST /tokenize and /detokenize, in vLLM's shapes."""

import asyncio
from collections.abc import Sequence
from typing import Any

from gateway.front import Front
from gateway.openai import request, tools
from gateway.openai.fields import Detokenize, Tokenize
from gateway.text import TextModel
from gateway.validate import in_thread
from protos.errors import BadInput
from protos.v1.inference_pb2 import GenerateRequest


async def tokenize(front: Front, body: Tokenize, model: TextModel) -> dict[str, Any]:
    """`count` of messages is what the usage of an answer to them says of the prompt. Raises BadInput."""
    if (body.prompt is None) == (body.messages is None):
        raise BadInput("prompt", "give either prompt or messages")
    asked = GenerateRequest(prompt=body.prompt or "", model=model.name)
    if body.messages is not None:
        told = tools.told(tools.MayCall(tuple(tool.function for tool in body.tools)))
        asked.chat.CopyFrom(request.conversation(body, request.messages(body.messages, told, model.takes)))
    try:
        tokens = await front.encode(asked, special=body.add_special_tokens)
    except BadInput as error:
        raise BadInput(request.CHAT_NAMES.get(error.field, "prompt"), error.problem) from None
    said = {"count": len(tokens), "max_model_len": model.context_tokens, "tokens": tokens}
    if body.return_token_strs:
        said["token_strs"] = await asyncio.to_thread(lambda: list(map(model.tokenizer.id_to_token, tokens)))
    return said


async def detokenize(front: Front, body: Detokenize, model: TextModel) -> dict[str, Any]:
    """Special tokens are told, too. A body may hold many tokens: few of a tenant's are worked on at a time. Raises
    BadInput."""
    return {"prompt": await in_thread(front.encoders(), _text, body.tokens, model)}


def _text(tokens: Sequence[int], model: TextModel) -> str:
    if max(tokens, default=0) >= model.vocab_size:
        raise BadInput("tokens", f"a token exceeds the vocabulary of {model.vocab_size}")
    return model.decode(tokens, special=True)
