"""Commands that a program of the worker carries out, because they need the model. Nothing is decided here."""

import os
import sys
from typing import Annotated

import typer


def pull(
    model: Annotated[
        str | None,
        typer.Argument(
            help="smollm2-135m; OWNER/NAME or OWNER/NAME@REVISION of the Hugging Face hub, or OWNER/NAME:FILE.gguf; "
            "a Hugging Face directory; a .gguf file."
        ),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Some models, with size and licence.")] = False,
) -> None:
    """Fetch MODEL into the local cache, converted if need be; prints its directory. LAPS_SD_CACHE moves the cache.

    Models of the hub lie in the hub's own cache, unless LAPS_SD_CACHE is set. HF_TOKEN opens those that need it.
    """
    if (model is None) != listed:
        raise typer.BadParameter("name a model, or give --list", param_hint="MODEL")
    _run("worker_service.pull", "--list" if model is None else model)


def _run(module: str, *arguments: str) -> None:
    """The program takes the place of this process."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", "laps_sd.interrupt", module, *arguments])
