"""How a request's input begins. Requests that begin alike are sent to one cell while it has room: its workers may
have the keys and values of that beginning."""

from protos.v1.inference_pb2 import GenerateRequest

CHARS = 1024  # of text; a shorter beginning is computed sooner than a fuller cell answers
TOKENS = 256


def beginning(request: GenerateRequest, tenant: str) -> str:
    """Equal for requests of a tenant, which alone may share, that begin alike; empty: too short to share anything."""
    match request.WhichOneof("input"):
        case "prompt":
            text = request.prompt[:CHARS]
        case "chat":
            text = ""
            for message in request.chat.messages:
                if len(text) >= CHARS:
                    break
                text += f"{message.role}\n{message.content[:CHARS]}\n"
        case "tokens":
            ids = request.tokens.ids[:TOKENS]
            return f"{tenant}\n{ids}" if len(ids) == TOKENS else ""
        case _:
            return ""
    return f"{tenant}\n{text[:CHARS]}" if len(text) >= CHARS else ""
