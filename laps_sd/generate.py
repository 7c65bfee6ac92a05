"""`laps-sd generate` and `resume`: print one answer of a running server. Nothing is served here."""

import json
import signal
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from laps_sd.interrupt import INTERRUPTED

if TYPE_CHECKING:  # imported where it is used: `--help` needs none of it
    from laps_sd.client import Client
    from laps_sd.completion import Completion
    from protos.errors import RequestError
    from protos.v1 import inference_pb2

Ask: TypeAlias = "Callable[[Client], AsyncIterator[inference_pb2.GenerateResponse]]"


class Class(StrEnum):
    interactive = "interactive"
    default = "default"
    batch = "batch"


Server = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT[,...]", help="Of one gateway or several. https:// in front: TLS, by the public authorities."
    ),
]
ApiKey = Annotated[str | None, typer.Option(envvar="LAPS_SD_API_KEY", help="Better in the environment.")]
Ca = Annotated[
    Path | None,
    typer.Option(
        envvar="LAPS_SD_CA", exists=True, dir_okay=False, help="PEM file of the authorities that are trusted."
    ),
]


def generate(
    prompt: Annotated[str, typer.Argument(help="One user message, or with --raw the text to be continued.")],
    server: Server = "127.0.0.1:50051",
    api_key: ApiKey = None,
    ca: Ca = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Default: 256, or what the context leaves.")] = None,
    min_tokens: Annotated[int, typer.Option(min=0)] = 0,
    temperature: Annotated[float | None, typer.Option(help="0 to 2; 0, the default, is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Over 0, up to 1.")] = None,
    top_k: Annotated[int, typer.Option(min=0, help="0: all.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Default: drawn by the server.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="From 0.01 to 2; 1: none.")] = None,
    presence_penalty: Annotated[float, typer.Option(help="-2 to 2.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="-2 to 2.")] = 0.0,
    logprobs: Annotated[
        int | None, typer.Option(min=0, max=20, help="With --json: of each token, and of so many likeliest ones.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the text; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.")] = False,
    predicted_tokens: Annotated[int | None, typer.Option(min=1, help="A guess of the length, for the order.")] = None,
    request_class: Annotated[Class, typer.Option("--class")] = Class.default,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is, without the chat template.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Neither a lost connection nor Ctrl-C ends the request.")
    ] = False,
    request_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Chosen by you: a request that is sent twice under it runs once.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="A table of statistics on stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of the text.")] = False,
) -> None:
    """Stream the answer to PROMPT from a running server."""
    if raw and system is not None:
        raise typer.BadParameter("a raw prompt takes no system message", param_hint="--system")
    params: dict[str, Any] = {
        "min_tokens": min_tokens,
        "top_k": top_k,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "stop": stop or [],
        "ignore_eos": ignore_eos,
        "priority": f"PRIORITY_{request_class.name.upper()}",
        # None leaves the field out: then the server's default holds.
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "repetition_penalty": repetition_penalty,
        "logprobs": logprobs,
        "request_id": request_id or (uuid.uuid4().hex if detach else None),
        "on_disconnect": f"ON_DISCONNECT_{'DETACH' if detach else 'CANCEL'}",
        "predicted_tokens": predicted_tokens,
    }
    if raw:
        params["prompt"] = prompt
    else:
        system_message = [] if system is None else [{"role": "system", "content": system}]
        params["messages"] = [*system_message, {"role": "user", "content": prompt}]
    after = f"it runs on: laps-sd resume {params['request_id']}" if detach else ""
    _show(server, api_key, ca, lambda client: client.generate(**params), as_json=as_json, stats=stats, after=after)


def resume(
    request_id: Annotated[str, typer.Argument(help="As in the answer's --json, or as chosen with --request-id.")],
    offset: Annotated[int, typer.Option(min=0, help="Output tokens to leave out.")] = 0,
    server: Server = "127.0.0.1:50051",
    api_key: ApiKey = None,
    ca: Ca = None,
    stats: Annotated[bool, typer.Option("--stats", help="A table of statistics on stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of the text.")] = False,
) -> None:
    """Stream the answer of an earlier request. Ctrl-C does to it what a lost connection would do."""
    _show(server, api_key, ca, lambda client: client.resume(request_id, offset), as_json=as_json, stats=stats)


def _show(
    server: str, api_key: str | None, ca: Path | None, ask: Ask, *, as_json: bool, stats: bool, after: str = ""
) -> None:
    """Prints the answer to stdout. `after`: printed to stderr after Ctrl-C. Raises typer.Exit."""
    import asyncio

    from laps_sd.client import Client
    from protos.errors import RequestError

    try:
        completion = asyncio.run(_stream(Client(server, api_key=api_key, ca=ca), ask, echo=not as_json))
    except RequestError as error:
        hint = " (use --raw for a model without a chat template)" if _lacks_template(error) else ""
        typer.echo(f"laps-sd: {error.code.name}: {error.message}{hint}", err=True)
        raise typer.Exit(1) from error
    if completion is None:
        if after:
            typer.echo(f"laps-sd: {after}", err=True)
        raise typer.Exit(INTERRUPTED)
    if as_json:
        present = {name: value for name, value in asdict(completion).items() if value is not None}
        typer.echo(json.dumps(present, ensure_ascii=False))
    if stats:
        _print_stats(completion)


async def _stream(client: "Client", ask: Ask, *, echo: bool) -> "Completion | None":
    """The answer, printed as it comes if `echo`. None: Ctrl-C was pressed; the connection is closed."""
    import asyncio

    task = asyncio.ensure_future(_collect(client, ask, echo=echo))
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def _collect(client: "Client", ask: Ask, *, echo: bool) -> "Completion":
    from laps_sd.completion import Collector

    collector = Collector()
    try:
        async with client:
            async for chunk in ask(client):
                collector.add(chunk)
                if echo:
                    print(chunk.text, end="", flush=True)
    finally:
        if echo and collector.text:
            print()
    return collector.completion()


def _lacks_template(error: "RequestError") -> bool:
    from protos.errors import BadInput

    return isinstance(error, BadInput) and error.message.startswith("chat: ") and "no chat template" in error.message


def _print_stats(completion: "Completion") -> None:
    from rich.console import Console
    from rich.table import Table

    spec, timings = completion.spec_decode, completion.timings_ms
    rate = spec.num_accepted_tokens / spec.num_draft_tokens if spec.num_draft_tokens else 0.0
    tokens = completion.usage["completion_tokens"]
    rows = {
        "finish reason": completion.finish_reason,
        "tokens": f"{completion.usage['prompt_tokens']} in, {tokens} out",
        "speculation": f"{spec.num_accepted_tokens} of {spec.num_draft_tokens} accepted ({rate:.0%}), "
        f"{spec.num_drafts} drafts",
        "queue": f"{timings['queue']:.1f} ms",
        "first token": f"{timings['ttft']:.1f} ms",
        "whole answer": f"{timings['e2el']:.1f} ms",
        "preemptions": str(completion.preemptions),
    }
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, value)
    Console(stderr=True).print(table)
