"""The body of POST /v1/embeddings. As in fields.py: nothing is decided about a request here."""

from typing import Annotated, Literal

from pydantic import Field

from gateway.openai.fields import Items, Own, TokenIds


class Embeddings(Own):
    """POST /v1/embeddings."""

    model: str
    input: str | Items[str] | TokenIds | Items[TokenIds]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = Field(None, description="refused: no model here can be cut short")
