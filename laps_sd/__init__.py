"""LAPS-SD: the Python client, `from laps_sd import Client, AsyncClient`, and the `laps-sd` command. Services are
reached by the wire alone."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laps_sd.client import AsyncClient, Client, Completion, RequestError

__all__ = ["AsyncClient", "Client", "Completion", "RequestError"]


def __getattr__(name: str) -> Any:
    """The client is loaded when it is first asked for: the command's `--help` does without gRPC."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from laps_sd import client

    return getattr(client, name)
