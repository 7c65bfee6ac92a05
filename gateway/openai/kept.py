"""Items of earlier answers by their ids: clients of the Responses API may name an item instead of sending it. Nothing
is kept for them: an item is made again from what the scheduler still knows of the request that it answered."""

import asyncio
import re
from typing import NamedTuple

from gateway.front import Front
from gateway.openai.response_fields import InputItem, Responses
from gateway.openai.tools import said
from gateway.validate import MAX_MESSAGES
from protos.errors import BadInput, NotServing, QueueFull, RequestError
from protos.v1.inference_pb2 import GetRequestRequest
from protos.v1.status_pb2 import REQUEST_STATE_FINISHED
from protos.v1.types_pb2 import Structure

MOST = 64  # earlier answers that one body names
READ_S = 10.0  # for all of them to be read
_ID = re.compile(r"msg_(?P<message>.+)|fc_(?P<name>[^.]+)\.(?P<call>.+)")


class _Answer(NamedTuple):
    """An answer's text, and its parts as `said` tells them."""

    text: str
    words: str
    name: str
    arguments: str


async def with_items(front: Front, body: Responses) -> Responses:
    """The body with items in place of their names. Raises BadInput where there is no such item any more; QueueFull;
    NotServing."""
    if isinstance(body.input, str) or not any(map(_is_name, body.input)):
        return body
    if (names := sum(map(_is_name, body.input))) > MAX_MESSAGES:
        raise BadInput("input", f"names {names} items; at most {MAX_MESSAGES}")
    answers: dict[str, _Answer] = {}  # by the id of the request
    items, room = list(body.input), front.max_input_bytes
    try:
        async with asyncio.timeout(READ_S):
            for number, item in enumerate(items):
                if _is_name(item):
                    found = await _item(front, f"input[{number}].id", item.id or "", answers)
                    # A body may name one long answer often. Each mention counts: each is copied into the prompt.
                    if (room := room - len(found.content or found.arguments or "")) < 0:
                        raise BadInput("input", f"the items that it names have more than {front.max_input_bytes} bytes")
                    items[number] = found
    except TimeoutError:
        raise NotServing(f"input: the items that it names could not be read in {READ_S:g} s") from None
    return body.model_copy(update={"input": items})


def _is_name(item: InputItem) -> bool:
    """OpenAI lets a client leave out the type."""
    return item.type == "item_reference" or (item.type is None and item.role is None and item.id is not None)


async def _item(front: Front, field: str, id: str, answers: dict[str, _Answer]) -> InputItem:
    if (found := _ID.fullmatch(id)) is None:
        raise _gone(field)
    request_id = found["message"] or found["call"]
    if request_id not in answers:
        if len(answers) == MOST:
            raise BadInput("input", f"names items of more than {MOST} answers: send the items themselves")
        text, form = await _text(front, field, request_id)
        answers[request_id] = _Answer(text, *said(text, form))
    answer = answers[request_id]
    if found["message"]:
        return InputItem.model_validate({"type": "message", "role": "assistant", "content": answer.words})
    # An answer that had to be this call is its arguments and nothing else.
    arguments = answer.arguments if answer.name == found["name"] else answer.text
    call = {"call_id": f"call_{request_id}", "name": found["name"], "arguments": arguments}
    return InputItem.model_validate({"type": "function_call"} | call)


async def _text(front: Front, field: str, request_id: str) -> tuple[str, Structure]:
    """Of an answer that has ended, and the form that it had to have."""
    try:
        known = await front.get_request(GetRequestRequest(request_id=request_id))
        if known.request.state == REQUEST_STATE_FINISHED:
            async with front.resume(request_id) as stream:
                return "".join([chunk.text async for chunk in stream]), stream.structure
    except (NotServing, QueueFull):
        raise
    except RequestError:
        raise _gone(field) from None
    raise BadInput(field, "the answer that it belongs to has not ended")


def _gone(field: str) -> BadInput:
    return BadInput(field, "there is no such item here, or no longer: send the item itself")
