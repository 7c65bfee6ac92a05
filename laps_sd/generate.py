"""`laps-sd generate` and `resume`: their flags, and the options of every command that asks a server. Nothing is asked
here."""

import sys
import uuid
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # imported where it is used: `--help` needs none of it
    from collections.abc import AsyncIterator

    from laps_sd.client import AsyncClient, Chunk, Params


class Class(StrEnum):
    interactive = "interactive"
    default = "default"
    batch = "batch"


Server = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT[,...]",
        envvar="LAPS_SD_SERVER",
        help="Of one gateway or several. https:// in front: TLS, by the public authorities.",
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
    prompt: Annotated[
        str, typer.Argument(help="One user message, or with --raw the text to be continued. -: read from stdin.")
    ],
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
        int | None, typer.Option(min=0, max=20, help="Needs --json: of each token, and of so many likeliest ones.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the text; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.")] = False,
    predicted_tokens: Annotated[int | None, typer.Option(min=1, help="A guess of the length, for the order.")] = None,
    request_class: Annotated[Class, typer.Option("--class")] = Class.default,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", exists=True, dir_okay=False, help="The answer is JSON of it.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The whole answer matches it.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="The answer is one of these texts; repeatable.")] = None,
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
    if logprobs is not None and not as_json:
        raise typer.BadParameter("log-probabilities are printed with --json alone", param_hint="--logprobs")
    forms = {"--json-schema": json_schema, "--regex": regex, "--choice": choice}
    if len(given := [name for name, form in forms.items() if form]) > 1:
        raise typer.BadParameter("give one of them at most", param_hint=" and ".join(given))
    from laps_sd.answer import show

    text = _stdin() if prompt == "-" else prompt
    # None leaves a field out: then the server's default holds.
    params: Params = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logprobs": logprobs,
        "stop": stop,
        "ignore_eos": ignore_eos,
        "predicted_tokens": predicted_tokens,
        "priority": request_class.value,
        "json_schema": None if json_schema is None else json_schema.read_text(encoding="utf-8", errors="replace"),
        "regex": regex,
        "choice": choice or None,
        "request_id": request_id or (uuid.uuid4().hex if detach else None),
        "on_disconnect": "detach" if detach else "cancel",
    }
    if not raw:
        system_message = [] if system is None else [{"role": "system", "content": system}]
        params["messages"] = [*system_message, {"role": "user", "content": text}]
    after = f"it runs on: laps-sd resume {params['request_id']}" if detach else ""

    def ask(client: "AsyncClient") -> "AsyncIterator[Chunk]":
        return client.generate(text if raw else None, **params)

    show(server, api_key, ca, ask, as_json=as_json, stats=stats, after=after)


def _stdin() -> str:
    """All of it. Raises typer.BadParameter."""
    if sys.stdin is None:
        raise typer.BadParameter("stdin is closed", param_hint="PROMPT")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"stdin is no UTF-8: {error}", param_hint="PROMPT") from None


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
    from laps_sd.answer import show

    show(server, api_key, ca, lambda client: client.resume(request_id, offset), as_json=as_json, stats=stats)
