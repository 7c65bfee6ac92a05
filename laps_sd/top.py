"""`laps-sd top`: queues, requests, workers and rates of a running service, on a terminal. It only calls Stats and
ListRequests, and changes nothing."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.live import Live

from laps_sd import terminal
from laps_sd.client import AsyncClient, NotServing, RequestError, RequestPage
from laps_sd.top_frame import Frame
from laps_sd.top_view import view


def watch(
    server: str, api_key: str | None, ca: Path | None, every_s: float, requests: int, *, once: bool, as_json: bool
) -> None:
    """Frames on stdout until Ctrl-C, or one of them. Raises typer.Exit(1) if the server refuses."""
    try:
        client = AsyncClient(server, api_key=api_key, ca=ca, max_retries=0)  # it asks again by itself
        asyncio.run(_watch(client, terminal.console(), every_s, requests, once=once, as_json=as_json))
    except RequestError as error:
        typer.echo(f"laps-sd: {error.code.name}: {error.message}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        return


async def _watch(
    client: AsyncClient, console: Console, every_s: float, requests: int, *, once: bool, as_json: bool
) -> None:
    live = console.is_terminal and not (once or as_json)
    async with client:
        with _screen(console) if live else _lines(console, as_json) as show:
            async for frame in frames(client, every_s, requests):
                if isinstance(frame, NotServing) and not live:
                    raise frame
                if live or (isinstance(frame, Frame) and frame.before is not None):
                    show(frame)
                    if once:
                        return


async def frames(client: AsyncClient, every_s: float, requests: int) -> AsyncIterator[Frame | NotServing]:
    """One at once, then one every `every_s` seconds. A server that cannot be reached gives a NotServing instead of a
    frame; every other error is raised. `requests`: so many are listed, 0 lists none."""
    clock = asyncio.get_running_loop().time
    before, asked_at = None, 0.0
    while True:
        try:
            stats, now = await client.stats(), clock()
            listed = await client.list_requests(requests) if requests else RequestPage()
        except NotServing as error:
            before = None
            yield error
        else:
            yield Frame(stats, before, now - asked_at, listed)
            before, asked_at = stats, now
        await asyncio.sleep(every_s)


Show = Callable[[Frame | NotServing], None]


@contextmanager
def _screen(console: Console) -> Iterator[Show]:
    """The whole terminal; what was on it is back afterwards."""
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        yield lambda frame: screen.update(view(frame), refresh=True)


@contextmanager
def _lines(console: Console, as_json: bool) -> Iterator[Show]:
    def show(frame: Frame | NotServing) -> None:
        if as_json and isinstance(frame, Frame):
            print(json.dumps(frame.as_dict()), flush=True)
        else:
            console.print(view(frame))

    yield show
