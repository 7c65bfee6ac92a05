"""POST /tokenize and /detokenize, in vLLM's shapes."""

import asyncio
from typing import Any

from gateway.front import Front
from gateway.openai import request
from gateway.openai.fields import Detokenize, Tokenize
from gateway.text import TextModel
from protos.errors import BadInput
from protos.v1.inference_pb2 import Chat, GenerateRequest


async def tokenize(front: Front, body: Tokenize, model: TextModel) -> dict[str, Any]:
    """`count` of messages is what the usage of an answer to them says of the prompt. Raises BadInput."""
    if (body.prompt is None) == (body.messages is None):
        raise BadInput("prompt", "give either prompt or messages")
    asked = GenerateRequest(prompt=body.prompt or "", model=model.name)
    if body.messages is not None:
        asked.chat.CopyFrom(Chat(messages=request.messages(body.messages)))
    try:
        tokens = await front.encode(asked)
    except BadInput as error:
        raise BadInput("prompt" if body.messages is None else "messages", error.problem) from None
    return {"count": len(tokens), "max_model_len": model.context_tokens, "tokens": tokens}


async def detokenize(model: TextModel, body: Detokenize) -> dict[str, Any]:
    """Special tokens are told, too. In a thread, since a body may hold many. Raises BadInput."""
    if any(token >= model.vocab_size for token in body.tokens):
        raise BadInput("tokens", f"a token exceeds the vocabulary of {model.vocab_size}")
    return {"prompt": await asyncio.to_thread(model.decode, body.tokens, special=True)}
