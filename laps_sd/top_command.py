"""`laps-sd top`: its flags. What it shows is made in top.py."""

from typing import Annotated

import typer

from laps_sd.generate import ApiKey, Ca, Server
from protos.bounds import MOST_LISTED


def top(
    server: Server = "127.0.0.1:50051",
    api_key: ApiKey = None,
    ca: Ca = None,
    every_s: Annotated[float, typer.Option(min=0.05, help="Between frames; rates are over that time.")] = 1.0,
    requests: Annotated[int, typer.Option(min=0, max=MOST_LISTED, help="So many are listed.")] = 20,
    once: Annotated[bool, typer.Option("--once", help="One frame, with rates, and no more.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object for each frame.")] = False,
) -> None:
    """Watch a running service: its queues, requests, workers, rates. A key needs the right `admin`. Ctrl-C ends it."""
    from laps_sd.top import watch

    watch(server, api_key, ca, every_s, requests, once=once, as_json=as_json)
