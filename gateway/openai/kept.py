"""Items of earlier answers by their ids: clients of the Responses API may name an item instead of sending it. Nothing
is kept for them: an item is made again from what the scheduler still knows of the request that it answered."""

import asyncio
import re

from gateway.front import Front
from gateway.openai.response_fields import InputItem, Responses
from gateway.openai.tools import said
from protos.errors import BadInput, NotServing, QueueFull, RequestError
from protos.v1.inference_pb2 import GetRequestRequest
from protos.v1.status_pb2 import REQUEST_STATE_FINISHED

MOST = 64  # earlier answers that one body names
READ_S = 10.0  # for all of them to be read
_ID = re.compile(r"msg_(?P<message>.+)|fc_(?P<name>[^.]+)\.(?P<call>.+)")


async def with_items(front: Front, body: Responses) -> Responses:
    """The body with items in place of their names. Raises BadInput where there is no such item any more; QueueFull;
    NotServing."""
    if isinstance(body.input, str) or not any(map(_is_name, body.input)):
        return body
    texts: dict[str, str] = {}  # by the id of the request
    items = list(body.input)
    try:
        async with asyncio.timeout(READ_S):
            for number, item in enumerate(items):
                if _is_name(item):
                    items[number] = await _item(front, f"input[{number}].id", item.id or "", texts)
    except TimeoutError:
        raise NotServing(f"input: the items that it names could not be read in {READ_S:g} s") from None
    return body.model_copy(update={"input": items})


def _is_name(item: InputItem) -> bool:
    """OpenAI lets a client leave out the type."""
    return item.type == "item_reference" or (item.type is None and item.role is None and item.id is not None)


async def _item(front: Front, field: str, id: str, texts: dict[str, str]) -> InputItem:
    if (found := _ID.fullmatch(id)) is None:
        raise _gone(field)
    request_id = found["message"] or found["call"]
    if request_id not in texts:
        if len(texts) == MOST:
            raise BadInput("input", f"names items of more than {MOST} answers: send the items themselves")
        texts[request_id] = await _text(front, field, request_id)
    words, name, arguments = said(texts[request_id])
    if found["message"]:
        return InputItem.model_validate({"type": "message", "role": "assistant", "content": words})
    if name != found["name"]:  # an answer that had to be this call is its arguments and nothing else
        arguments = texts[request_id]
    call = {"call_id": f"call_{request_id}", "name": found["name"], "arguments": arguments}
    return InputItem.model_validate({"type": "function_call"} | call)


async def _text(front: Front, field: str, request_id: str) -> str:
    """Of an answer that has ended."""
    try:
        known = await front.get_request(GetRequestRequest(request_id=request_id))
        if known.request.state == REQUEST_STATE_FINISHED:
            async with front.resume(request_id) as stream:
                return "".join([chunk.text async for chunk in stream])
    except (NotServing, QueueFull):
        raise
    except RequestError:
        raise _gone(field) from None
    raise BadInput(field, "the answer that it belongs to has not ended")


def _gone(field: str) -> BadInput:
    return BadInput(field, "there is no such item here, or no longer: send the item itself")
